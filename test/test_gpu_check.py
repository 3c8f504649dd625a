"""dev/gpu_check.py: the order of its parts, its exit codes, and what it says of what could not run."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from conftest import LONG, TOP, run, slow
import gpu_check
import gpu_programs
import launch
from gpu_programs import FAILED, LEFT_OUT, NO_TIME, PASSED


@pytest.fixture
def check(tmp_path, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "prepare", lambda check: None)
    yield gpu_programs.Check(True, 300)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def results(tmp_path):
    return (tmp_path / "build/gpu_check/results.txt").read_text()


@pytest.mark.parametrize("verdicts, code", [
    ([PASSED, PASSED], 0), ([PASSED, FAILED, NO_TIME], 1), ([PASSED, NO_TIME], 3), ([PASSED, LEFT_OUT], 3), ([""], 0)])
def test_exit_codes(check, verdicts, code, tmp_path):
    for verdict in verdicts:
        check.row("part", "case", verdict, "why")
    assert check.close() == code
    rows = results(tmp_path).splitlines()
    assert len(rows) == len(verdicts) + 1 and rows[-1].startswith("gpu_check: ")


def test_a_part_that_breaks_stops_no_other(check, tmp_path, monkeypatch):
    def breaks(check):
        raise KeyError("peak_mb")
    monkeypatch.setattr(gpu_check, "PARTS", {"breaks": breaks, "goes_on": lambda check: check.row("goes_on", "", PASSED)})
    assert gpu_check.check_all(check, ["breaks", "goes_on"]) == 1
    assert re.search(r"^breaks +FAILED +KeyError: 'peak_mb'\ngoes_on +passed$", results(tmp_path), re.M)


def test_what_tells_most_comes_first():
    order = list(gpu_check.PARTS)
    assert order[:5] == "units memcheck bandwidth stages any_ranks".split() and order[-1] == "llmc"
    assert gpu_check.targets(["units", "bandwidth"])[-1] == "build/gpu_check/bandwidth"
    assert {f"build/test/{name}" for name in gpu_check.UNITS} <= set(gpu_check.targets(order))


def test_no_time(tmp_path):
    result = run(["dev/gpu_check.sh", "--dry-run", "--budget", "0.5", "--only", "stages"], check=False)
    assert result.code == 3 and len(re.findall(r"^stages .* did not fit", result.out, re.M)) == 4, result.out
    assert (TOP / "build/gpu_check/results.txt").read_text() == result.out


@pytest.mark.parametrize("log, said", [
    ("llmc_zero/safetensors.cuh:30:10: fatal error: xxhash.h: No such file or directory", "xxhash.h is missing: run dev/"),
    ('train_mlp.cu(3): error: cannot open source file "nccl.h"', "nccl.h is missing: set NCCL_HOME"),
    ("/usr/bin/ld: cannot find -lnccl: No such file or directory", "-lnccl is missing: set NCCL_HOME"),
    ("x.cu:1:10: fatal error: other.h: No such file or directory", "other.h is missing: install it"),
    ("x.cu:1:1: error: expected ';'", "")])
def test_what_is_missing(log, said):
    assert gpu_programs.missing(log).startswith(said) and bool(gpu_programs.missing(log)) == bool(said)


def test_a_rank_that_fails_ends_its_peers(check, tmp_path):
    sleep = f"{1000 + os.getpid()}"
    outcome = check.run("ranks", 200, [["sh", "-c", "echo why; exit 3"], ["sleep", sleep]])
    assert outcome.verdict == FAILED and "why" in outcome.text
    assert "exit code 3\n    | why" in results(tmp_path)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):   # it has ended
            assert sleep.encode() not in path.read_bytes()


def test_what_cannot_be_built(check, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin/make"
    make.write_text("#!/bin/sh\necho 'x.cuh:1:10: fatal error: xxhash.h: No such file or directory'; exit 2\n")
    make.chmod(0o755)
    monkeypatch.setitem(os.environ, "PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    check.environment["PATH"] = os.environ["PATH"]
    assert gpu_check.check_all(check, ["stages"]) == 3
    assert len(re.findall("^stages .*left out +xxhash.h is missing: run dev/deps.sh", results(tmp_path), re.M)) == 4


@slow
@pytest.mark.skipif(os.environ.get("DEVICE") == "cuda", reason="would replace the build for the GPU")
def test_dry_run():
    result = run([sys.executable, "dev/gpu_check.py", "--dry-run", "--budget", "1500"], timeout=LONG, check=False)
    rows = (TOP / "build/gpu_check/results.txt").read_text()
    assert result.code == 0 and rows == result.out, result.out
    parts = list(dict.fromkeys(re.findall(r"^(\w[\w., ]*?)  +\S.* passed", rows, re.M)))
    assert parts == ["unit test", "memcheck", "bandwidth", "stages", "any ranks", "recipe", "variants", "overlap",
                     "racecheck", "memcheck, long", *(["llm.c"] if "LLMC_DIR" in os.environ else [])]
    assert re.findall(r"^recipe +(\d) ranks", rows, re.M) == ["1", "2", "4"]
    assert len(re.findall(r"^stages .* stages 0 to 3 ", rows, re.M)) == 4
    assert len(re.findall(r"^any ranks .* 1, 2 and 4 ranks, ", rows, re.M)) == 4
    for kernel in ("update AdamW fp32", "update AdamW bf16 + masters", "update AdamW bf16 stochastic"):
        assert re.search(rf"^bandwidth +{re.escape(kernel)}, .*%? of copy", rows, re.M)
    assert re.search(r"^bandwidth +norm bf16, .* of read", rows, re.M)
    assert (TOP / "build/gpu_check/timeline.1.json").stat().st_size > 1000


def test_wrong_usage():
    assert run(["dev/gpu_check.sh", "--fast"], check=False).code == 2
    if not launch.gpus():
        result = run(["dev/gpu_check.sh"], check=False, env={"DEVICE": "cuda"})
        assert result.code == 2 and "needs nvcc and a GPU" in result.err
