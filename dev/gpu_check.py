#!/usr/bin/env python3
"""Checks the project on a machine with nvcc and one GPU, the most telling parts first, within a time that is given.

    dev/gpu_check.py [--budget SECONDS] [--only PART ...] [--dry-run]

Nothing is installed or fetched, and no MPI is needed: ranks share the GPU and find each other through a folder. NCCL and
cuBLASLt may be there as Python packages only. Headers and GoogleTest may come along with the checkout, from a machine
with a network:

    dev/deps.sh                                             # leaves xxhash.h and nlohmann/ in build/headers
    mkdir -p build/gtest && cp -r /usr/include/gtest /usr/src/googletest/googletest/src build/gtest

Programs are built side by side, and a part starts when its own are there; what measures time waits for all of them. A
row is printed, and added to build/gpu_check/results.txt, as soon as it is known; a part that fails stops no other.

Exit code: 0 all passed, 1 something failed, 3 nothing failed, but something did not fit into the time or could not run
for want of something (its row says of what), 2 wrong usage or no GPU.

--dry-run does the same on the CPU build, with small sizes, a twentieth of each unit test, and no compute-sanitizer.
With LLMC_DIR=a checkout of llm.c that one is trained too, off and sharded (dev/llmc/compare.sh).
"""

import argparse
import os
import re
import shutil
import sys
from gpu_programs import FAILED, LEFT_OUT, NO_TIME, PASSED, TOP, WORK, Check, has_gpu, prepare


# ---- the parts: functions of a Check that write their rows -----------------------------------------------------

KERNELS = ("test_adamw", "test_grad_norm", "test_reduce", "test_stages")
FAST = tuple(f"{name}_fast" for name in KERNELS[:3])   # built with --use_fast_math
OTHERS = sorted({path.stem for path in TOP.glob("test/test_*.cu") if not path.stem.startswith("test_cpu_")} - {*KERNELS})
UNITS = (*KERNELS, *FAST, *OTHERS)
ON_RANKS = ("test_checkpoint", "test_optimizer", "test_stages")   # take -pi, -pf, -pn, -pr

# Without the two that launch tens of thousands of kernels: these come at the end.
MEMCHECK = [("test_adamw", "-*EverySizeAtEveryAlignment"), ("test_grad_norm", "-*InfAndNanAtEveryPlace*"),
            ("test_reduce", "*"), ("test_stages", "*")]
# Ranks that share a GPU take 2 to 4 ms for a collective: these make 600 to 6,000 of them.
MANY_RANKS = [
    (2, "test_optimizer", "*EveryElement*:*MicroSteps*:*NormIsGlobal*:*Masters*:*Passenger*:*RanksMustAgree*:*AVote*"),
    (2, "test_stages", "-*ManySmall*"),
    (2, "test_checkpoint", "*AnyNumber*:*Stacked*:*StepSamples*:*TypesMayChange*:*LargeArrays*:*NoPadding*:*Nan*"),
    (3, "test_optimizer", "*MicroSteps*:*NormIsGlobal*:*Poisoned*:*OwnSettings*"),
    (4, "test_stages", "*OrderedKeeps*:*AnotherOrder*:*NextUnit*:*MisuseOfSlots*"),
    (4, "test_checkpoint", "*AnyNumber*:*Stacked*"),
]


def unit_test(check, part, name, limit, filters="*", ranks=1, tool=()):
    """One unit program on its ranks: what row() takes."""
    case = name + (f", {ranks} ranks" if ranks > 1 else "")
    why = check.unbuilt(f"build/test/{name}")
    if why:
        return part, case, *why
    variables = {"GTEST_FILTER": filters}
    if check.dry:   # a twentieth of the tests
        variables.update(GTEST_TOTAL_SHARDS="20", GTEST_SHARD_INDEX="0")
    log = re.sub(r"\W+", "-", f"{part} {case}")
    command = [*tool, f"build/test/{name}"]
    outcome = check.ranks(log, limit, ranks, command, variables) if name in ON_RANKS else \
        check.run(log, limit, [command], [variables])
    said = re.findall(r"ERROR SUMMARY: .*|\d+ tests? from .* ran", outcome.text)
    return part, case, outcome.verdict, said[-1] if said else outcome.text * (outcome.verdict == NO_TIME)


def units(check):
    check.side_by_side([lambda name=name: unit_test(check, "unit test", name, 60) for name in UNITS])


def sanitized(check, part, tool, tests, limit):
    command = [] if check.dry else ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if command and not shutil.which(command[0]):
        check.row(part, "", LEFT_OUT, "compute-sanitizer is missing")
        return
    check.side_by_side([lambda test=test: unit_test(check, part, test[0], limit, test[1], tool=command) for test in tests])


def memcheck(check):
    sanitized(check, "memcheck", "memcheck", MEMCHECK, 90)


def racecheck(check):
    sanitized(check, "racecheck", "racecheck", MEMCHECK, 90)


def memcheck_long(check):
    sanitized(check, "memcheck, long", "memcheck", [("test_adamw", "*EverySize*"), ("test_grad_norm", "*InfAndNan*")], 150)


def bandwidth(check):
    """dev/gpu_check.cu: its rows are WHAT|SIZE|TIME|SHARE."""
    why = check.unbuilt("build/gpu_check/bandwidth")
    if why:
        check.row("bandwidth", "", *why)
        return
    check.wait_for_builds()
    outcome = check.run("bandwidth", 60, [[WORK / "bandwidth", *(("20000", "1000000") if check.dry else ())]])
    log = WORK / "logs/bandwidth.0.log"
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.count("|") == 3:
            what, size, *numbers = line.split("|")
            check.row("bandwidth", f"{what}, {size}", "", ", ".join(filter(None, numbers)))
    check.row("bandwidth", "all sizes", outcome.verdict, outcome.text * (outcome.verdict == NO_TIME))


SMALL = ("-L", "4", "-C", "200")
OWN = ("-I", "own", "-l", "1e-4")   # other data on each rank


def compared(check, part, case, runs, said, key="params_hash"):
    """Runs (name, ranks, flags) of train_mlp that must end with the same hash; said(summaries) tells their numbers."""
    why = check.unbuilt("train_mlp")
    if why:
        check.row(part, case, *why)
        return
    summaries = []
    for name, ranks, flags in runs:
        outcome, summary = check.train(name, ranks, *flags)
        if outcome.verdict != PASSED:
            check.row(part, case, outcome.verdict, f"{' '.join(flags)} {outcome.text * (outcome.verdict == NO_TIME)}")
            return
        summaries.append(summary)
    hashes = [summary[key] for summary in summaries]
    check.row(part, case, PASSED if len(set(hashes)) == 1 else FAILED,
              said(summaries) + ("" if len(set(hashes)) == 1 else f"; hashes {' '.join(hashes)}"))


def numbers(summaries):
    peaks, states, times = ([f"{value:.4g}" for value in values] for values in zip(
        *((s["peak_mb"][-1], s["optimizer_state_mb"], s["step_ms"]) for s in summaries)))
    return f"peak {' '.join(peaks)} MB, m and v {' '.join(states)} MB, step {' '.join(times)} ms"


def off_on(check, part, case, ranks, *flags):
    name = re.sub(r"\W+", "-", f"{part} {case} {ranks}")
    compared(check, part, f"{case}{ranks} ranks, off and sharded",
             [(f"{name}-z{stage}", ranks, ("-z", str(stage), *flags)) for stage in (0, 1)], numbers)


def stages(check):
    """One hash in all stages where sums are ordered."""
    for ranks in (1, 2):
        for dtype in ("bf16", "fp32"):
            compared(check, "stages", f"{ranks} ranks, {dtype}, stages 0 to 3",
                     [(f"stages-{ranks}-{dtype}-z{stage}", ranks, ("-z", str(stage), "-x", "5", "-P", dtype, "-R", "ordered",
                                                                  "-A", "micro", *SMALL, *OWN)) for stage in range(4)],
                     numbers)


def any_ranks(check):
    """-R ordered: 1, 2 and 4 ranks end with one run hash, micro-batches that do not divide, too."""
    for dtype in ("fp32", "bf16"):
        for stage in (1, 3):
            flags = (*SMALL, "-x", "5", "-R", "ordered", "-I", "split", "-d", "180", "-l", "1e-4", "-P", dtype)
            compared(check, "any ranks", f"1, 2 and 4 ranks, {dtype}, stage {stage}",
                     [(f"any-{ranks}-{dtype}-z{stage}", ranks, (*flags, "-z", str(stage)))
                      for ranks in (1, 2, 4)], numbers, key="run_hash")


def recipe(check):
    check.wait_for_builds()   # its times are told
    for ranks in (1, 2, 4):
        off_on(check, "recipe", "", ranks, "-x", "5", *(SMALL if check.dry else ()))


def many_ranks(check):
    check.side_by_side([lambda test=test: unit_test(check, "unit test", test[1], 60, test[2], ranks=test[0])
                        for test in MANY_RANKS])


def variants(check):
    flags = (*OWN, "-x", "5", *(SMALL if check.dry else ()))
    off_on(check, "variants", "buckets, ", 2, "-K", "0.25" if check.dry else "25", *flags)
    off_on(check, "variants", "bf16 masters, ", 2, "-P", "bf16", *flags)
    off_on(check, "variants", "bf16 stochastic, ", 2, "-P", "bf16", "-w", "0", *flags)


def overlap(check):
    """How long the compute stream stood still in stage 3, and a trace of all ranks and streams."""
    flags = (*OWN, "-z", "3", "-P", "bf16", "-R", "ordered", "-A", "micro", "-x", "10", *(SMALL if check.dry else ()))
    compared(check, "overlap", "2 ranks, stage 3, -O 1 and -O 0",
             [(f"overlap-{on}", 2, ("-O", on, "-T", f"{WORK}/timeline.{on}.json", *flags)) for on in "10"],
             lambda runs: "exposed ms a step: " + ", ".join(
                 f"{run['exposed_ms']:.3g} of {run['step_ms']:.3g}" for run in runs))


def llmc(check):
    """Log and model on = off; the update's time cannot be told from the rest of a step there."""
    steps = "5" if check.dry else "20"
    cases = [(f"tiny, {ranks} ranks", "--ranks", str(ranks), "--steps", steps) for ranks in (1, 2, 4)]
    cases += [(f"tiny, 2 ranks, stage {stage}", "--stage", str(stage), "--steps", steps) for stage in (2, 3)]
    big = () if check.dry else ("--model", "d12", "--flags", "-b 16 -t 1024")
    cases.append(("step time beside plain llm.c", "--ranks", "1", "--steps", "12", "--speed", *big))
    check.environment["NO_MPI"] = "1"   # one build for ranks that share the GPU and one that does not
    for case, *flags in cases:
        command = ["dev/llmc/compare.sh", os.environ["LLMC_DIR"], "--no-install", "--precision", "BF16", *flags]
        outcome = check.run(re.sub(r"\W+", "-", f"llmc {case}"), 120, [command])
        said = re.findall(r"^compare: BF16, .*; (m \+ v.*)", outcome.text, re.M)
        check.row("llm.c", case, outcome.verdict, said[-1] if said else "")


# In this order; the first seven should be done after about half of the default budget.
PARTS = {part.__name__: part for part in (units, memcheck, bandwidth, stages, any_ranks, recipe, many_ranks, variants,
                                          overlap, racecheck, memcheck_long, llmc)}


def check_all(check, parts):
    """Runs the parts; the program's exit code."""
    prepare(check)
    check.build(targets(parts))
    for name in parts:
        try:
            PARTS[name](check)
        except Exception as error:   # the others are still worth having
            check.row(name, "", FAILED, f"{type(error).__name__}: {error}")
    return check.close()


def targets(parts):
    """What the parts need, in the order of need; of a pair, the program that takes longer to compile first."""
    programs = []
    if {"units", "memcheck", "racecheck", "memcheck_long", "many_ranks"} & set(parts):
        programs += [f"build/test/{name}" for name in UNITS]
    if {"stages", "any_ranks", "recipe", "variants", "overlap"} & set(parts):
        programs.insert(0, "train_mlp")   # takes the longest
    return [*programs, *(["build/gpu_check/bandwidth"] if "bandwidth" in parts else [])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="all of it ends by then (540)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU build; so does DEVICE=cpu")
    options = parser.parse_args()
    os.chdir(TOP)
    dry = options.dry_run or os.environ.get("DEVICE") == "cpu"
    os.environ["PATH"] += os.pathsep + os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    if not dry and not (shutil.which("nvcc") and has_gpu()):
        print("gpu_check: needs nvcc and a GPU; --dry-run tries this script on the CPU build", file=sys.stderr)
        return 2
    parts = [name for name in PARTS if name in (options.only or PARTS) and (name != "llmc" or "LLMC_DIR" in os.environ)]
    return check_all(Check(dry, options.budget), parts)


if __name__ == "__main__":
    sys.exit(main())
