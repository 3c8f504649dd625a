"""The hash list, test/data/hashes.json: what runs must come out as, to the last bit, from version to version.

    hashes.check("section", {"-z 1 ...": "parameters loss norm file", ...})

A difference is a change for everyone who compares runs: it belongs into a commit of its own, which says so and why, and
into CHANGES.md. `make hashes` writes the list anew (HASHES=write); `git diff` then shows what has moved.
"""

import ctypes
import hashlib
import json
import os
import struct

from conftest import TOP

LIST = TOP / "test/data/hashes.json"
LIBM = "2618cddab4ad915a"   # of_libm() where the list was made: glibc 2.36


def of_bytes(data):
    return hashlib.sha256(data).hexdigest()[:16]


def of_tensors(path):
    """Of a checkpoint's tensors alone: names, types, shapes and bytes, not who wrote it."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return of_bytes(json.dumps(header, sort_keys=True).encode() + data[8 + length:])


def of_libm():
    """Of the C library's elementary functions: where it differs, runs that use them may."""
    libm = ctypes.CDLL("libm.so.6")
    bits = b""
    for name in ("expf", "logf", "tanhf", "cosf"):
        function = getattr(libm, name)
        function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
        bits += b"".join(struct.pack("<f", function(0.013 * i)) for i in range(1, 2000))
    return of_bytes(bits)


def check(section, found):
    kept = json.loads(LIST.read_text()) if LIST.exists() else {}
    if os.environ.get("HASHES") == "write":
        kept[section] = found
        LIST.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return
    expected = kept.get(section, {})
    moved = [f"{line}\n  is   {found.get(line)}\n  was  {expected.get(line)}"
             for line in sorted({*found, *expected}) if found.get(line) != expected.get(line)]
    assert not moved, f"{len(moved)} of {len(expected)} moved (test/hashes.py says what to do):\n" + "\n".join(moved[:20])
