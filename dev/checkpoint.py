#!/usr/bin/env python3
"""Looks into checkpoints of llmc_zero.

    dev/checkpoint.py show FILE...      what was saved; a table: tensor, type, shape, norm, largest, not finite
    dev/checkpoint.py diff A B          tensors that differ, and by how much; settings that differ
    dev/checkpoint.py verify FILE...    reads each file whole and compares every checksum

Exit code 0: fine, equal; 1: they differ, or a file is damaged; 2: no such file, no checkpoint, or a Python package is
missing. show and diff need numpy, verify xxhash: of the Python that runs this, or of .venv (dev/deps.sh makes it).
"""

import argparse
import importlib
import json
import math
import os
import re
import shlex
import signal
import sys

VENV = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.venv/bin/python"))
FORMAT = "llmc_zero.checkpoint 1"
HEADER_MAX = 100_000_000         # bytes, as in llmc_zero/safetensors.cuh
NUMBER_MAX = 2 ** 63 - 1         # of any number, as there
COUNTS = ("step", "samples", "t", "skipped", "skipped_in_row", "dropped")   # the last three: not in every file
OWN = ("pieces", "header_xxh3")  # about the file, not about the run
SIZES = {"F32": 4, "BF16": 2}


class Unusable(Exception):
    pass


def needed(package, command):
    """The package's module; where this Python has none, .venv's Python takes over, and where that has none it is said."""
    try:
        return importlib.import_module(package)
    except ImportError:
        if os.access(VENV, os.X_OK) and not os.environ.get("CHECKPOINT_PY"):
            os.execve(VENV, [VENV, *sys.argv], {**os.environ, "CHECKPOINT_PY": "1"})
        raise Unusable(f"{command} needs {package}: {shlex.quote(sys.executable)} -m pip install {package}") from None


class Checkpoint:
    """A file's header. metadata: {key: text}; tensors, in the file's order: {name: (type, shape, begin, end)} with the
    offset of the first byte, and of that after the last, from the start of the data; data: where that starts."""

    def __init__(self, path):
        self.path, self.size = path, os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(self.size - 8, HEADER_MAX):
                raise Unusable(f"{path}: no checkpoint, or cut off within its header")
            self.data = 8 + length
            try:
                header = json.loads(file.read(length))
                self.metadata = header.pop("__metadata__", {})
                if self.metadata.get("format") != FORMAT:
                    raise Unusable(f"{path}: its format is {self.metadata.get('format')!r}, not {FORMAT!r}")
                self.tensors = {name: (entry["dtype"], entry["shape"], *map(int, entry["data_offsets"]))
                                for name, entry in header.items()}
                self.tensors = dict(sorted(self.tensors.items(), key=lambda item: item[1][2:]))
                self.end = 0
                for type_, shape, begin, end in self.tensors.values():
                    whole = all(isinstance(n, int) and 0 <= n <= NUMBER_MAX for n in shape)
                    if not whole or begin != self.end or end - begin != math.prod(shape) * SIZES[type_]:
                        raise ValueError
                    self.end = end
                self.pieces = [(int(offset), int(size), checksum) for offset, size, checksum in
                               map(str.split, filter(None, self.metadata["pieces"].split(";")))]
                if any(not 0 <= size <= self.size for _, size, _ in self.pieces):
                    raise ValueError
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise Unusable(f"{path}: no checkpoint, or its header is damaged") from None

    def values(self, np, name):
        """A tensor in fp32. BF16 is the upper half of it."""
        type_, shape, begin, end = self.tensors[name]
        count = (end - begin) // SIZES[type_]
        raw = np.fromfile(self.path, "<u2" if type_ == "BF16" else "<u4", count, offset=self.data + begin)
        if raw.size != count:
            raise Unusable(f"{self.path}: it is cut off, in tensor {name}")
        return (raw.astype("<u4") << 16 if type_ == "BF16" else raw).view("<f4").reshape(shape)


def show(*paths):
    np = needed("numpy", "show")
    for path in paths:
        checkpoint = Checkpoint(path)
        print(f"{path}: {checkpoint.size / 1e6:.3f} MB, {len(checkpoint.pieces)} pieces")
        print("  " + "  ".join(f"{key} {value}" for key, value in sorted(checkpoint.metadata.items()) if key not in OWN))
        print(f"  {'tensor':32} {'type':6} {'shape':20} {'norm':>15} {'largest':>15} not finite")
        for name, (type_, shape, *_) in checkpoint.tensors.items():
            values = checkpoint.values(np, name)
            finite = values[np.isfinite(values)].astype(np.float64)
            print(f"  {name:32} {type_:6} {str(shape):20} "
                  f"{np.sqrt((finite * finite).sum()):15.9g} {np.abs(finite).max(initial=0.0):15.9g} "
                  f"{values.size - finite.size or ''}")
    return 0


def diff(path_a, path_b):
    np = needed("numpy", "diff")
    a, b = Checkpoint(path_a), Checkpoint(path_b)
    differ = 0
    for key in sorted((set(a.metadata) | set(b.metadata)) - set(OWN)):
        if a.metadata.get(key) != b.metadata.get(key):
            print(f"{key}: {a.metadata.get(key)} | {b.metadata.get(key)}")
    for name in sorted(set(a.tensors) ^ set(b.tensors)):
        print(f"{name}: only in {path_a if name in a.tensors else path_b}")
        differ += 1
    for name in sorted(set(a.tensors) & set(b.tensors)):
        x, y = a.values(np, name), b.values(np, name)
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
    print(f"{differ} of {len(set(a.tensors) | set(b.tensors))} tensors differ")
    return 1 if differ else 0


def damage(checkpoint, xxhash):
    """What is wrong with the file's bytes, or None."""
    with open(checkpoint.path, "rb") as file:
        header = file.read(checkpoint.data)
        mark = b',"header_xxh3":"'
        at = header.find(mark) + len(mark)
        zeroed = header[:at] + b"0" * 16 + header[at + 16:]
        if xxhash.xxh3_64_hexdigest(zeroed) != checkpoint.metadata.get("header_xxh3"):
            return "its header has another checksum"
        for key in COUNTS:
            value = str(checkpoint.metadata.get(key, 0))
            if not re.fullmatch(r"[0-9]+", value) or int(value) > NUMBER_MAX:
                return f"{key} is {value!r}; a whole number up to 2^63 - 1 is needed"
        end = 0
        for offset, size, checksum in checkpoint.pieces:
            if offset != end:
                return f"a piece at {offset} where one at {end} must follow"
            end += size
            if xxhash.xxh3_64_hexdigest(file.read(size)) != checksum:
                return f"bytes {checkpoint.data + offset} to {checkpoint.data + end} have another checksum"
        if end != checkpoint.end or file.read(1):
            return "the pieces do not cover the tensors"
    return None


def verify(*paths):
    xxhash = needed("xxhash", "verify")
    bad = 0
    for path in paths:
        found = damage(Checkpoint(path), xxhash)
        print(f"{path}: {found or 'whole'}")
        bad += found is not None
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, count in ((show, "+"), (diff, 2), (verify, "+")):
        added = commands.add_parser(command.__name__)
        added.add_argument("files", nargs=count, metavar="FILE")
        added.set_defaults(call=command)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")   # names may have letters that the terminal's set has not
    try:
        return arguments.call(*arguments.files)
    except (Unusable, OSError, MemoryError, ValueError) as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # | head
    sys.exit(main())
