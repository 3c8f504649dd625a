#!/usr/bin/env python3
"""Looks into checkpoints of llmc_zero, with the public safetensors package.

    dev/checkpoint.py show FILE...      what was saved; a table: tensor, type, shape, norm, largest, not finite
    dev/checkpoint.py diff A B          tensors that differ, and by how much; settings that differ
    dev/checkpoint.py verify FILE...    reads each file whole and compares every checksum

Exit code 0: fine, equal; 1: they differ, or a file is damaged; 2: no such file, or no checkpoint. It runs with the
Python of .venv (dev/deps.sh makes it): safetensors, numpy, ml_dtypes, xxhash.
"""

import argparse
import json
import os
import sys

VENV = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".venv", "bin", "python")
try:
    import ml_dtypes
    import numpy as np
    import xxhash
    from safetensors import safe_open
except ImportError as error:  # started with another Python than .venv's
    if os.path.exists(VENV) and not os.environ.get("CHECKPOINT_PY"):
        os.execve(VENV, [VENV, *sys.argv], {**os.environ, "CHECKPOINT_PY": "1"})
    sys.exit(f"checkpoint.py: {error}: run dev/deps.sh test")

FORMAT = "llmc_zero.checkpoint 1"
OWN = ("pieces", "header_xxh3")  # about the file, not about the run


class Unreadable(Exception):
    pass


def open_checkpoint(path):
    """safetensors' handle and the metadata; Unreadable in words."""
    try:
        handle = safe_open(path, framework="numpy")
    except Exception as error:  # the package has several kinds
        raise Unreadable(f"{path}: {error}") from None
    metadata = handle.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise Unreadable(f"{path}: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    return handle, metadata


def tensor_in_fp32(handle, name):
    return np.asarray(handle.get_tensor(name)).astype(np.float32)


def show(paths):
    for path in paths:
        handle, metadata = open_checkpoint(path)
        print(f"{path}: {os.path.getsize(path) / 1e6:.3f} MB, {metadata['pieces'].count(';') + 1} pieces")
        print("  " + "  ".join(f"{key} {value}" for key, value in sorted(metadata.items()) if key not in OWN))
        print(f"  {'tensor':32} {'type':6} {'shape':20} {'norm':>15} {'largest':>15} not finite")
        for name in handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys():
            part = handle.get_slice(name)
            values = tensor_in_fp32(handle, name)
            finite = values[np.isfinite(values)].astype(np.float64)
            print(f"  {name:32} {part.get_dtype():6} {str(list(part.get_shape())):20} "
                  f"{np.sqrt((finite * finite).sum()):15.9g} {np.abs(finite).max(initial=0.0):15.9g} "
                  f"{values.size - finite.size or ''}")
    return 0


def diff(path_a, path_b):
    (a, metadata_a), (b, metadata_b) = open_checkpoint(path_a), open_checkpoint(path_b)
    differ = 0
    for key in sorted((set(metadata_a) | set(metadata_b)) - set(OWN)):
        if metadata_a.get(key) != metadata_b.get(key):
            print(f"{key}: {metadata_a.get(key)} | {metadata_b.get(key)}")
    names_a, names_b = set(a.keys()), set(b.keys())
    for name in sorted(names_a ^ names_b):
        print(f"{name}: only in {path_a if name in names_a else path_b}")
        differ += 1
    for name in sorted(names_a & names_b):
        x, y = tensor_in_fp32(a, name), tensor_in_fp32(b, name)
        if x.shape != y.shape:
            print(f"{name}: {list(x.shape)} | {list(y.shape)}")
            differ += 1
        elif x.tobytes() != y.tobytes():
            unequal = x.view(np.uint32) != y.view(np.uint32)
            gap = np.abs(x.astype(np.float64) - y)
            where = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
            print(f"{name}: {int(unequal.sum())} of {x.size} elements differ, by {gap.flat[where]:.9g} at element "
                  f"{where}: {x.flat[where]:.9g} | {y.flat[where]:.9g}")
            differ += 1
    print(f"{differ} of {len(names_a | names_b)} tensors differ")
    return 1 if differ else 0


def damage(path, metadata):
    """What is wrong with the file's bytes, or None."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + length)
        mark = b',"header_xxh3":"'
        at = header.index(mark) + len(mark)
        zeroed = header[:at] + b"0" * 16 + header[at + 16:]
        if xxhash.xxh3_64_hexdigest(zeroed) != metadata["header_xxh3"]:
            return "its header has another checksum"
        end = 0
        for piece in filter(None, metadata["pieces"].split(";")):
            offset, size, checksum = piece.split()
            if int(offset) != end:
                return f"a piece at {offset} where one at {end} must follow"
            end += int(size)
            if xxhash.xxh3_64_hexdigest(file.read(int(size))) != checksum:
                return f"bytes {8 + length + int(offset)} to {8 + length + end} have another checksum"
        tensors = {name: value for name, value in json.loads(header[8:]).items() if name != "__metadata__"}
        if end != max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0) or file.read(1):
            return "the pieces do not cover the tensors"
    return None


def verify(paths):
    bad = 0
    for path in paths:
        _, metadata = open_checkpoint(path)
        found = damage(path, metadata)
        print(f"{path}: {found or 'whole'}")
        bad += found is not None
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, count in (("show", "+"), ("diff", 2), ("verify", "+")):
        commands.add_parser(name).add_argument("files", nargs=count, metavar="FILE")
    arguments = parser.parse_args()
    try:
        if arguments.command == "diff":
            return diff(*arguments.files)
        return show(arguments.files) if arguments.command == "show" else verify(arguments.files)
    except (Unreadable, OSError) as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2


assert ml_dtypes.bfloat16  # registers the type that numpy does not know
if __name__ == "__main__":
    sys.exit(main())
