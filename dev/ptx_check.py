#!/usr/bin/env python3
"""Checks the PTX of the update and norm kernels, built with --use_fast_math: dev/ptx_check.py FILE.ptx

Every kernel whose name begins with zero_:
  - no approximate arithmetic in fp32 (sqrt.approx, div.approx, div.full, rcp.approx, rsqrt.approx ...).
    .rn.ftz is all right: what --use_fast_math may do to denormals is known and the same on both paths.
Every instance of the update kernel (3 algorithms x fp32, and bf16 with masters and stochastic, each with gradients in bf16
and in fp32: fifteen are due):
  - fp32 data is read and written 16 bytes at a time (v4.f32), at least once for each buffer it has to touch;
  - bf16 data is read and written 8 bytes at a time (v2.b32, v4.b16 or b64), once or more for each of them.
Both instances of the norm kernel and both of the sum kernel take eight elements at a time (16 bytes of bf16, twice 16 of
fp32), the sum kernel of its own gradients, those of the others, the sums before and the store.

Prints one line a kernel; exit code 1 if something is not as it should be.
"""

import re
import sys

APPROXIMATE = re.compile(r"\b(?:\w+\.approx(?:\.ftz)?\.f32|div\.full(?:\.ftz)?\.f32)")
WIDE = r"\.global(?:\.\w+)*\.v4\.[fbu]32"
HALF = r"\.global(?:\.\w+)*\.(?:v2\.[ubf]32|v4\.[ub]16|b64)"
ACCESSES = [re.compile(r"\b" + kind + width) for width in (WIDE, HALF) for kind in ("ld", "st")]
NAMES = ("16-byte loads", "16-byte stores", "8-byte loads", "8-byte stores")
ALGORITHMS = ("AdamW", "Adam", "SGD")                         # ZeroAlgorithm
ROUNDINGS = ("fp32", "bf16 + masters", "bf16 stochastic")     # ZeroRounding
WITH_FP32_GRADS = {"bf16 + masters": (2, 1, 0, 1), "bf16 stochastic": (1, 0, 1, 1)}
# Buffers that must be read and written: (fp32 loads, fp32 stores, bf16 loads, bf16 stores) without m and v
ALWAYS = {"fp32": (2, 1, 0, 0), "bf16 + masters": (1, 1, 1, 1), "bf16 stochastic": (0, 0, 2, 1)}


def kernels(text):
    """{mangled name: body} of the kernels of a PTX file."""
    parts = re.split(r"\.entry\s+(\w+)", text)
    return dict(zip(parts[1::2], parts[2::2]))


def expected(name):
    """A kernel's description and its least counts (16-byte loads, stores, 8-byte loads, stores)."""
    update = re.search(r"zero_update_kernel\w*?ZeroAlgorithm(\d)E\w*?ZeroRounding(\d)E", name)
    if update:
        algorithm, rounding = ALGORITHMS[int(update[1])], ROUNDINGS[int(update[2])]
        states = 1 if algorithm == "SGD" else 2
        wide_grads = rounding != "fp32" and name[update.end():].startswith("8ZeroBf16f")
        loads, stores, loads_8, stores_8 = (WITH_FP32_GRADS if wide_grads else ALWAYS)[rounding]
        what = f"update {algorithm}, {rounding}{', fp32 sums' if wide_grads else ''}"
        return what, (loads + states, stores + states, loads_8, stores_8)
    grad = "bf16" if "ZeroBf16" in name else "fp32"
    if "zero_norm_squares_kernel" in name:
        return f"norm {grad}", (1 if grad == "bf16" else 2, 0, 0, 0)
    if "zero_sum_kernel" in name:   # (own, of the others, sums before), sums
        return f"sum {grad}", (1 + 1 + 2 if grad == "bf16" else 2 + 2 + 2, 2, 0, 0)
    length, rest = re.match(r"_Z(\d+)(\w+)", name).groups()
    return rest[:int(length)], (0, 0, 0, 0)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: dev/ptx_check.py FILE.ptx")
    with open(sys.argv[1], encoding="utf-8") as file:
        found = {name: body for name, body in kernels(file.read()).items() if re.match(r"_Z\d+zero_", name)}
    wrong = 0
    updates = others = 0
    for name, body in found.items():
        title, least = expected(name)
        updates += title.startswith("update")
        others += title.startswith(("sum ", "norm "))
        counts = [len(pattern.findall(body)) for pattern in ACCESSES]
        faults = sorted(set(APPROXIMATE.findall(body)))
        for what, count, need in zip(NAMES, counts, least):
            if count < need:
                faults.append(f"{count} {what}, {need} needed")
        wrong += bool(faults)
        print(f"ptx: {title:42} 16-byte {counts[0]:2} loads {counts[1]:2} stores   8-byte {counts[2]:2} loads "
              f"{counts[3]:2} stores   {'fine' if not faults else 'WRONG: ' + '; '.join(faults)}")
    if updates != 15 or others != 4:
        print(f"ptx: WRONG: {updates} instances of the update kernel, {others} of norm and sum, 15 and 4 expected")
        wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
