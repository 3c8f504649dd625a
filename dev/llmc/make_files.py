#!/usr/bin/env python3
"""Makes small input files for llm.c: tokens of a text, and a model with random weights.

    dev/llmc/make_files.py tokens FILE TEXT [TEXT ...]
    dev/llmc/make_files.py model FILE [--precision BF16|FP32] [--max-length T] [--vocabulary V] [--layers L]
                                      [--heads H] [--channels C] [--seed S]

A token is a byte of the text (0 .. 255). A TEXT is a file, or a folder: its text files, those below included,
in order of their names. Both files begin with 256 numbers of 4 bytes, little-endian:

    tokens   20240520, version 1, how many; then that many tokens of 2 bytes
    model    20240326, version 3 (FP32) or 5 (BF16), T, V, L, H, C, V padded to a multiple of 128; then the 16
             tensors in llm.c's order, each of all layers

Weights are what GPT-2 starts from: normal with deviation 0.02 (projections 0.02 / sqrt(2 L)), layernorms 1,
biases 0, rows of the padding 0. The same seed gives the same file, and BF16 is FP32 rounded to the nearest.
llm.c's softmax wants rows of at least 1024 vectors of 16 bytes: V from 4096 (FP32) or 8192 (BF16) up.
Only Python itself is needed, so that this runs on any machine with a GPU. Exit code 1: one line says why.
"""

import argparse
import array
import math
import os
import random
import sys
from pathlib import Path

TOKENS_MAGIC, MODEL_MAGIC = 20240520, 20240326
VERSIONS = {"FP32": 3, "BF16": 5}
# The model of the tests: max length, vocabulary, layers, heads, channels.
TINY = (64, 8192, 2, 2, 32)
SOFTMAX_ROW = {"FP32": 4096, "BF16": 8192}


class Problem(Exception):
    pass


def header(*values):
    return array.array("i", [*values, *[0] * (256 - len(values))])


def little_endian(numbers):
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


# ---- tokens ------------------------------------------------------------------------------------------------

def texts_of(path):
    """The text files that a path stands for: itself, or those of a folder."""
    path = Path(path)
    if not path.exists():
        raise Problem(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    left_out = ("build", "__pycache__")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and
             not any(part.startswith(".") or part in left_out for part in file.relative_to(path).parts)]
    return [file for file in files if is_text(file)]


def is_text(path):
    with open(path, "rb") as file:
        return b"\0" not in file.read(4096)


def write_tokens(path, texts):
    """Writes the bytes of all texts as tokens; returns how many."""
    files = [file for text in texts for file in texts_of(text)]
    data = b"".join(file.read_bytes() for file in files)
    if not data:
        raise Problem(f"no text in {', '.join(map(str, texts))}")
    if len(data) >= 2**31:
        raise Problem(f"{len(data)} bytes of text: at most 2 GB")
    tokens = bytearray(2 * len(data))
    tokens[::2] = data   # the low bytes
    Path(path).write_bytes(little_endian(header(TOKENS_MAGIC, 1, len(data))) + tokens)
    return len(data)


# ---- model -------------------------------------------------------------------------------------------------

def tensors(max_length, vocabulary, layers, channels):
    """[(elements, start)] in llm.c's order; start: 0, 1, or the deviation of a normal distribution."""
    T, V, L, C = max_length, vocabulary, layers, channels
    projection = 0.02 / math.sqrt(2 * L)
    return [(V * C, 0.02), (T * C, 0.02),                             # wte, wpe
            (L * C, 1), (L * C, 0),                                   # ln1
            (L * 3 * C * C, 0.02), (L * 3 * C, 0),                    # qkv
            (L * C * C, projection), (L * C, 0),                      # attproj
            (L * C, 1), (L * C, 0),                                   # ln2
            (L * 4 * C * C, 0.02), (L * 4 * C, 0),                    # fc
            (L * C * 4 * C, projection), (L * C, 0),                  # fcproj
            (C, 1), (C, 0)]                                           # lnf


def bfloat16(numbers):
    """The upper halves of fp32 numbers, rounded to nearest even; for finite numbers."""
    bits = array.array("I", numbers.tobytes())
    return array.array("H", ((x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits))


def write_model(path, precision="BF16", dims=TINY, seed=1):
    """Writes a model file; returns how many parameters it has."""
    max_length, vocabulary, layers, heads, channels = dims
    if precision not in VERSIONS:
        raise Problem(f"precision {precision}: BF16 or FP32")
    if min(dims) < 1:
        raise Problem("length, vocabulary, layers, heads and channels are from 1 up")
    if channels % heads:
        raise Problem(f"{channels} channels cannot be shared by {heads} heads")
    if vocabulary < SOFTMAX_ROW[precision]:
        raise Problem(f"vocabulary {vocabulary}: llm.c's softmax never ends below "
                      f"{SOFTMAX_ROW[precision]} in {precision}")
    padded = -(-vocabulary // 128) * 128
    rng = random.Random(seed)
    values = array.array("f")
    for index, (count, start) in enumerate(tensors(max_length, padded, layers, channels)):
        drawn = vocabulary * channels if index == 0 else count
        values.extend([start] * drawn if start in (0, 1) else (rng.gauss(0, start) for _ in range(drawn)))
        values.extend([0] * (count - drawn))
    head = header(MODEL_MAGIC, VERSIONS[precision], max_length, vocabulary, layers, heads, channels, padded)
    numbers = values if precision == "FP32" else bfloat16(values)
    Path(path).write_bytes(little_endian(head) + little_endian(numbers))
    return len(values)


# ---- command line ------------------------------------------------------------------------------------------

def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens", help="a file of tokens")
    tokens.add_argument("file", metavar="FILE")
    tokens.add_argument("texts", metavar="TEXT", nargs="+")
    model = commands.add_parser("model", help="a file of random weights")
    model.add_argument("file", metavar="FILE")
    model.add_argument("--precision", default="BF16", choices=VERSIONS)
    for name, value in zip(("max-length", "vocabulary", "layers", "heads", "channels"), TINY):
        model.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"({value})")
    model.add_argument("--seed", type=int, default=1, metavar="N", help="(1)")
    args = parser.parse_args(arguments)
    try:
        os.makedirs(os.path.dirname(args.file) or ".", exist_ok=True)
        if args.command == "tokens":
            print(f"{args.file}: {write_tokens(args.file, args.texts)} tokens")
        else:
            dims = (args.max_length, args.vocabulary, args.layers, args.heads, args.channels)
            print(f"{args.file}: {write_model(args.file, args.precision, dims, args.seed)} parameters")
    except (Problem, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"make_files: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
