"""A trainer that an earlier version of dev/llmc/patch.py has patched: today's takes it back, and takes it over.

test/data/patched_52adae9.tar.xz is the small trainer of commit 52adae9 as its patch left it, without third_party/.
"""

import hashlib
import shutil
import sys
import tarfile

import pytest

from conftest import TOP, run
from test_llmc_runs import run_lines, tokens

ARCHIVE = TOP / "test/data/patched_52adae9.tar.xz"
UNPATCHED = "c78c9ba6e50dcfafc655650725cc300ea0231afc184001babd6eb72dda09b752"   # digest() of test/small_llmc in 52adae9
PATCH = [sys.executable, TOP / "dev/llmc/patch.py"]


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(folder):
    lines = "".join(f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(contents(folder).items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.fixture
def tree(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "tree")
    assert b"optimizer state and gradients sharded" in (tmp_path / "tree/llmc/zero.cuh").read_bytes()   # for every trainer
    return tmp_path / "tree"


def test_it_is_reverted(tree):
    run([*PATCH, tree, "--revert"])
    assert not (tree / "llmc_zero").exists() and digest(tree) == UNPATCHED


def test_edits_by_hand_stay_when_it_is_reverted(tree):
    for file in ("train_gpt2.cu", "llmc/zero.cuh"):
        (tree / file).write_text("// by hand\n" + (tree / file).read_text())
    run([*PATCH, tree, "--revert"])
    for file in ("train_gpt2.cu", "llmc/zero.cuh"):
        text = (tree / file).read_text()
        assert text.startswith("// by hand\n")
        (tree / file).write_text(text[len("// by hand\n"):])
    assert digest(tree) == UNPATCHED


@pytest.mark.parametrize("flags", [["--drop-own-code"], ["--mends-only"]])
def test_it_is_taken_over(tree, tmp_path, flags):
    """Patching again is as patching what was there before 52adae9: no header of then is left, and it can be reverted."""
    fresh = shutil.copytree(tree, tmp_path / "fresh")
    run([*PATCH, fresh, "--revert"])
    run([*PATCH, fresh, *flags])
    run([*PATCH, tree, *flags])
    assert contents(tree) == contents(fresh)
    run([*PATCH, tree, "--revert"])
    assert digest(tree) == UNPATCHED


def test_it_trains_when_it_was_taken_over(tree, tmp_path):
    run([*PATCH, tree, "--drop-own-code"])
    run([TOP / "dev/cpu/nvcc", "-std=c++17", "-O1", "-DENABLE_FP32", "-DMULTI_GPU", "-lnccl", "-o", tmp_path / "program",
         "train_gpt2.cu"], cwd=tree, timeout=300)
    lines = [f"-z {z} -x 40 -n 40 -l 0.02 -R ordered -A micro {tokens(2, 2)}" for z in (0, 1, 2, 3)]
    outcomes = run_lines(tmp_path / "program", 2, tmp_path, lines)
    losses = outcomes[0].column("trl")
    assert len(losses) == 40 and sum(losses[-10:]) < sum(losses[:10]) - 3
    assert all(outcome.bits == outcomes[0].bits and f"stage {z}, " in outcome.out for z, outcome in enumerate(outcomes))
