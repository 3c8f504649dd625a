"""dev/llmc/make_files.py: its files, byte by byte. dev/llmc/compare.sh: what it refuses; with LLMC_DIR=a
checkout of llm.c also from end to end, and what it says when something is wrong.
"""

import array
import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy
import pytest

from conftest import LONG, TOP, own_lines, run
import launch

sys.path.insert(0, str(TOP / "dev/llmc"))
import make_files

TOOL = [sys.executable, TOP / "dev/llmc/make_files.py"]
COMPARE = str(TOP / "dev/llmc/compare.sh")


def header(path):
    return numpy.frombuffer(path.read_bytes()[:1024], "<i4")


def numbers(path, kind):
    """What stands behind the header."""
    return numpy.frombuffer(path.read_bytes()[1024:], kind)


# ---- tokens

@pytest.mark.parametrize("text", [b"a", b"llm", bytes(range(256)), "zwölf\n".encode(), b"x" * 5001])
def test_tokens_are_the_bytes_of_a_text(tmp_path, text):
    (tmp_path / "text").write_bytes(text)
    out = run([*TOOL, "tokens", tmp_path / "tokens.bin", tmp_path / "text"]).out
    assert out == f"{tmp_path}/tokens.bin: {len(text)} tokens\n"
    head = header(tmp_path / "tokens.bin")
    assert head[:3].tolist() == [20240520, 1, len(text)] and not head[3:].any()
    assert numbers(tmp_path / "tokens.bin", "<u2").tolist() == list(text)
    assert (tmp_path / "tokens.bin").stat().st_size == 1024 + 2 * len(text)


def test_tokens_of_folders(tmp_path):
    folder = tmp_path / "a folder"
    for name, text in {"b.txt": b"two", "a/z.txt": b"one", ".hidden": b"no", ".git/x": b"no",
                       "build/y": b"no", "picture": b"\x89PNG\0\0", "empty": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    (tmp_path / "last").write_bytes(b"three")
    assert make_files.write_tokens(tmp_path / "tokens.bin", [folder, tmp_path / "last"]) == 11
    assert numbers(tmp_path / "tokens.bin", "<u2").astype("u1").tobytes() == b"onetwothree"


# ---- models

def parameters(T, V, L, C):
    padded = (V + 127) // 128 * 128
    return padded * C + T * C + L * (12 * C * C + 13 * C) + 2 * C


@pytest.mark.parametrize("precision, version, size", [("FP32", 3, 4), ("BF16", 5, 2)])
@pytest.mark.parametrize("dims", [make_files.TINY, (16, 8300, 3, 4, 8)])
def test_model_file(tmp_path, precision, version, size, dims):
    T, V, L, heads, C = dims
    names = ("max-length", "vocabulary", "layers", "heads", "channels")
    words = [word for name, value in zip(names, dims) for word in (f"--{name}", value)]
    path = tmp_path / "model.bin"
    count, padded = parameters(T, V, L, C), (V + 127) // 128 * 128
    out = run([*TOOL, "model", path, "--precision", precision, *words]).out
    assert out == f"{path}: {count} parameters\n"
    head = header(path)
    assert head[:8].tolist() == [20240326, version, T, V, L, heads, C, padded] and not head[8:].any()
    assert path.stat().st_size == 1024 + size * count
    values = numbers(path, "<f4" if size == 4 else ml_dtypes.bfloat16).astype("f8")
    assert len(values) == count and numpy.isfinite(values).all()
    at = 0
    for index, (elements, start) in enumerate(make_files.tensors(T, padded, L, C)):
        tensor = values[at:at + elements]
        if index == 0:
            assert not tensor[V * C:].any()   # the rows of the padding
            tensor = tensor[:V * C]
        if start in (0, 1):
            assert (tensor == start).all()
        else:
            assert abs(tensor.std() / start - 1) < 5 / len(tensor)**0.5
            assert abs(tensor.mean()) < 5 * start / len(tensor)**0.5
        at += elements
    assert at == count


def test_bf16_is_fp32_rounded_and_a_seed_gives_one_file(tmp_path):
    for name, precision, seed in (("a", "FP32", 1), ("b", "BF16", 1), ("c", "BF16", 1), ("d", "BF16", 2)):
        make_files.write_model(tmp_path / name, precision, seed=seed)
    exact = numbers(tmp_path / "a", "<f4").astype(ml_dtypes.bfloat16)
    assert (exact.view("<u2") == numbers(tmp_path / "b", "<u2")).all()
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() != (tmp_path / "d").read_bytes()


def test_rounding_to_bf16():
    bits = [0, 1, 0x80000000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF,
            0xBF818000]
    values = numpy.array(bits, "u4").view("f4")
    with numpy.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view("u2").tolist()
    assert make_files.bfloat16(array.array("f", values.tobytes())).tolist() == expected


@pytest.mark.parametrize("words, message", [
    (["tokens", "OUT", "nothing"], "nothing: no such file or folder"),
    (["tokens", "OUT", "empty"], "no text in empty"),
    (["tokens", "OUT", "folder"], "no text in folder"),
    (["tokens", "folder", "text"], "folder: Is a directory"),
    (["tokens", "text/x/OUT", "text"], "text/x: Not a directory"),
    (["model", "OUT", "--channels", "33"], "33 channels cannot be shared by 2 heads"),
    (["model", "OUT", "--layers", "0"], "are from 1 up"),
    (["model", "OUT", "--vocabulary", "4096"], "4096: llm.c's softmax never ends below 8192 in BF16"),
    (["model", "OUT", "--vocabulary", "4095", "--precision", "FP32"], "never ends below 4096 in FP32")])
def test_bad_input(tmp_path, words, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("text")
    result = run([*TOOL, *words], cwd=tmp_path, check=False)
    said = own_lines(result.err, "make_files: ")
    assert result.code == 1 and len(said) == 1 and message in said[0], result.err
    assert "Traceback" not in result.err and not (tmp_path / "OUT").exists()


def test_wrong_usage():
    for words in ([], ["tokens"], ["tokens", "file"], ["model", "file", "--precision", "FP16"],
                  ["model", "file", "--heads", "x"]):
        assert run([*TOOL, *words], check=False).code == 2


# ---- compare.sh, before it needs llm.c

@pytest.mark.parametrize("words, message", [
    ([], "DIR is missing"), ([""], "DIR is empty"), (["nowhere"], "nowhere is not a folder"),
    (["dev"], "dev is no checkout of llm.c: it has no train_gpt2.cu"),
    (["dev", "test"], "test: DIR is dev already"), (["dev", "--steps"], "--steps needs a value"),
    (["dev", "--ranks", "0"], "--ranks 0: a number from 1 up"), (["dev", "--fast"], "--fast: no such option"),
    (["dev", "--stage", "4"], "--stage 4: 1, 2 or 3"), (["dev", "--precision", "FP16"], "--precision FP16: BF16 or FP32")])
def test_compare_refuses(words, message):
    result = run([COMPARE, *words], check=False)
    said = own_lines(result.err, "compare: ")
    assert result.code == 2 and len(said) == 1 and message in said[0], result.err


def test_compare_help_and_the_makefile():
    out = run([COMPARE, "--help"]).out
    assert "--nvcc-only" in out and "Exit code" in out and "set -euo" not in out
    result = run(["make", "llmc"], check=False, env={"LLMC_DIR": None})
    assert result.code != 0 and "DIR is empty" in result.err


# ---- compare.sh until it compiles: with the small trainer, in a copy of this project where nothing can be built

MAKEFILE = """help:
\t@echo 'device: cpu   compiler: none   MPI: no'
build/llmc/%: FORCE
\t@echo cannot build; false
FORCE:
"""


@pytest.fixture
def project(tmp_path):
    top = tmp_path / "project"
    for folder in ("dev/llmc", "llmc_zero"):
        shutil.copytree(TOP / folder, top / folder)
    (top / "dev/cpu").mkdir()
    (top / "Makefile").write_text(MAKEFILE)
    (top / "dev/deps.sh").write_text('#!/bin/sh\necho "$@" >>installed\n')
    (top / "dev/deps.sh").chmod(0o755)
    return top


@pytest.fixture
def checkout(tmp_path):
    tree = shutil.copytree(TOP / "test/small_llmc", tmp_path / "llm c")
    (tree / "Makefile").write_text("NVCC_INCLUDES =\n")
    return tree


HEADERS = {"CPATH": f"{TOP}/build/headers:{TOP}/.venv/include"}   # the copy of the project has none


def compare_in(project, *words):
    return run([project / "dev/llmc/compare.sh", *words], check=False, env=HEADERS)


@pytest.mark.parametrize("before", [[], ["--drop-own-code"], ["--mends-only"]])
def test_a_checkout_that_is_patched_already(project, checkout, tmp_path, before):
    """As the README has it: patch first, then compare. The same is built as of one that is not patched."""
    patch = [sys.executable, project / "dev/llmc/patch.py"]
    fresh = shutil.copytree(checkout, tmp_path / "fresh")
    run([*patch, fresh, "--drop-own-code"], env=HEADERS)
    if before:
        run([*patch, checkout, *before], env=HEADERS)
    here = source_files(checkout)
    result = compare_in(project, checkout, "--drop-own-code")
    assert result.code == 2 and "train_gpt2.cu did not compile" in result.err, result.err
    built = source_files(project / "build/llmc/src")
    expected = {path: data for path, data in source_files(fresh).items() if path.name != ".clang-format"}
    records = [json.loads(files.pop(Path("llmc_zero/patch.json"))) for files in (built, expected)]
    assert records[0] == records[1]
    assert {**built, **expected} == built and built[Path("Makefile")] == b"NVCC_INCLUDES = -Illmc_zero/third_party\n"
    assert source_files(checkout) == here and (project / "installed").read_text() == "demo\n"


@pytest.mark.parametrize("flags", [[], ["--nvcc-only"]])
def test_nothing_is_installed_for_a_checkout_that_does_not_fit(project, checkout, flags):
    text = (checkout / "train_gpt2.cu").read_text()
    for wrong, message in ((text.replace("gpt2_calculate_grad_norm", "another_name"), "gpt2_calculate_grad_norm: not found"),
                           (text, "--drop-own-code")):   # the small trainer has code of its own in what is replaced
        (checkout / "train_gpt2.cu").write_text(wrong)
        result = compare_in(project, checkout, *flags)
        assert result.code == 2 and result.err.startswith("compare: the patch does not fit this llm.c: "), result.err
        assert message in result.err and "  edit  " not in result.err and not (project / "installed").exists()


def test_headers_that_can_be_installed_are_no_misfit(project, checkout):
    """patch.py says that with 3."""
    python = project / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase " $* " in *" --check "*) exit 3 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = compare_in(project, checkout, "--drop-own-code")
    assert (project / "installed").exists() and "train_gpt2.cu did not compile" in result.err, result.err


# ---- compare.sh with the real llm.c

LLMC = os.environ.get("LLMC_DIR")
real = pytest.mark.skipif(not LLMC, reason="LLMC_DIR names no checkout of llm.c")
WORK = TOP / "build/llmc"
FEW = ["--steps", "4", "--no-install"]


def compare(*words, **more):
    return run([COMPARE, *words], timeout=LONG, check=False, **more)


def source_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and ".git" not in path.parts}


@real
@pytest.mark.parametrize("precision", ["BF16", "FP32"])
def test_off_and_sharded_are_the_same(tmp_path, precision):
    spaces = tmp_path / "a folder with spaces"
    spaces.mkdir()
    (spaces / "llm c").symlink_to(Path(LLMC).resolve())
    (spaces / "my text").write_text("Different data on each rank. " * 500)
    before = source_files(LLMC)
    words = ["llm c", *FEW, "--precision", precision, "--text", "my text"]
    result = compare(*words, cwd=spaces)
    assert result.code == 0, result.out + result.err
    masters = "" if precision == "FP32" else " + masters"
    said = f"compare: {precision}, 2 ranks: log and model the same off and sharded; m + v{masters} "
    assert said in result.out
    assert result.out.count("\n  yes  ") == 4 and "\n  NO" not in result.out
    assert source_files(LLMC) == before
    assert (WORK / "loss.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("z0", "z1"):
        assert (WORK / name / "output.txt").exists() and len(list((WORK / name).glob("*.bin"))) == 1
        assert (WORK / name / "main.log").read_text().count("trl:") == 4
    assert header(WORK / "tokens.bin")[:3].tolist() == [20240520, 1, (spaces / "my text").stat().st_size]
    again = compare(*words, "--flags", "-d 256", cwd=spaces)   # builds nothing
    assert again.code == 0 and "building" not in again.out
    assert "grad_accum_steps=2" in (WORK / "z1/output.txt").read_text()


@real
@pytest.mark.parametrize("stage", ["2", "3"])
def test_stages_2_and_3_are_the_same_as_off(stage):
    result = compare(LLMC, *FEW, "--stage", stage, "--flags", "-d 256")
    assert result.code == 0 and f"-z {stage}, 1/2" in result.out, result.out + result.err
    assert result.out.count("\n  yes  ") == 4 and "\n  NO" not in result.out


@real
def test_without_mpi():
    (WORK / "ncclUniqueId.sync").write_bytes(b"stale" * 100)
    result = compare(LLMC, *FEW, "--ranks", "2", env={"NO_MPI": 1})
    assert result.code == 0, result.out + result.err
    assert not (WORK / "ncclUniqueId.sync").exists() and "BF16-no-mpi" in result.out


@real
@pytest.mark.parametrize("after, message", [
    ('sed -i "s/trl:8/trl:9/" "$out/main.log"', "the logs differ"),
    ('printf x | dd of="$model" bs=1 seek=5000 conv=notrunc status=none', "the model files differ"),
    ('printf x >>"$model"', "the model files differ")])
def test_a_difference_is_found(tmp_path, after, message):
    """mpirun in front of the real one spoils what the sharded run leaves."""
    wrapper = tmp_path / "mpirun"
    wrapper.write_text(f'#!/usr/bin/env bash\nset -e\n"{launch.mpirun()}" "$@"\n'
                       'out=z1 model=z1/model_00000004.bin\n'
                       f'case " $* " in *" -z 1"*) {after} ;; esac\n')
    wrapper.chmod(0o755)
    result = compare(LLMC, *FEW, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result.code == 1, result.out + result.err
    assert f"compare: FAILED: {message}\n" in result.out and result.out.count("FAILED") == 1
    assert result.out.count("\n  NO   ") == 1


@real
def test_a_run_that_learns_nothing_proves_nothing():
    for flags in ("-l 0 -c 0", "-l 1e30"):
        result = compare(LLMC, *FEW, "--flags", flags)
        assert result.code == 1 and "compare: FAILED: nothing was learnt" in result.out, result.out + result.err


@real
def test_its_own_folder_is_not_emptied():
    assert compare(LLMC, *FEW).code == 0
    result = compare(WORK / "src", *FEW)
    assert result.code == 2 and "which empties it" in result.err
    assert (WORK / "src/train_gpt2.cu").exists()


@real
def test_a_patched_llm_c_compares_as_it_is(tmp_path):
    fork = tmp_path / "fork"
    shutil.copytree(LLMC, fork, ignore=shutil.ignore_patterns(".git", "*.bin"))
    run([sys.executable, TOP / "dev/llmc/patch.py", fork])
    before = source_files(fork)
    assert compare(fork, *FEW).code == 0 and source_files(fork) == before


@real
def test_what_stops_it(tmp_path):
    fork = tmp_path / "fork"
    shutil.copytree(LLMC, fork, ignore=shutil.ignore_patterns(".git", "*.bin"))
    source = fork / "train_gpt2.cu"
    text = source.read_text()
    source.write_text(text.replace("int main(", "int oops = undeclared_word;\nint main(", 1))
    result = compare(fork, *FEW)
    assert result.code == 2
    assert "train_gpt2.cu did not compile" in result.err and "undeclared_word" in result.err
    source.write_text(text.replace("gpt2_calculate_grad_norm", "another_name"))
    result = compare(fork, *FEW)
    assert result.code == 2 and "the patch does not fit this llm.c: " in result.err
    assert "gpt2_calculate_grad_norm" in result.err
    result = compare(LLMC, *FEW, "--flags", "-nonsense 1")
    assert result.code == 2
    assert "the run z0 ended with an error; all of it is in build/llmc/z0/output.txt" in result.err
    result = compare(LLMC, *FEW, "--text", tmp_path / "nothing")
    assert result.code == 2 and "nothing: no such file or folder" in result.err
    (tmp_path / "short").write_text("x" * 512)
    result = compare(LLMC, *FEW, "--text", tmp_path / "short", "--flags", "-t 64 -b 2 -b 4")
    assert result.code == 2 and "512 bytes of text are too few: 2 ranks take 513 at a time" in result.err
    result = compare(LLMC, *FEW, "--model", tmp_path / "no.bin")
    assert result.code == 2 and "no.bin: no such model file" in result.err


@real
def test_step_time_beside_llmc_alone():
    result = compare(LLMC, *FEW, "--ranks", "1", "--speed")
    assert result.code == 0, result.out + result.err
    assert " of llm.c without llmc_zero" in result.out.split("\ncompare: BF16, 1 ranks: ")[1]
    assert "no llmc_zero" in result.out
