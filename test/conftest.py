"""What the test files share: running a program on several ranks under a time limit.

    from conftest import TOP, run, slow
    result = run(["./train_mlp", "-z", "1"], ranks=2)      # asserts exit code 0 unless check=False
    result.code, result.out, result.err, result.seconds

slow marks tests that only `make test-all` runs (RUN_ALL=1).
"""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "dev"))
import launch

Result = namedtuple("Result", "code out err seconds")
slow = pytest.mark.skipif(os.environ.get("RUN_ALL") != "1", reason="slow: make test-all")


def run(args, ranks=None, timeout=60, env=None, cwd=TOP, check=True):
    """Runs args in the project's top folder, on `ranks` ranks under mpirun, or as they are if ranks is None.

    env adds variables (a value of None removes one). Past timeout seconds the whole process group is killed
    and the test fails, with what was printed. check=False accepts any exit code.
    """
    command = launch.command(ranks, args)
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=launch.environment(env), text=True, errors="replace",
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{out[-2000:]}\n{err[-2000:]}")
    result = Result(process.returncode, out, err, time.monotonic() - start)
    if check and result.code != 0:
        pytest.fail(f"exit code {result.code}: {' '.join(command)}\n{out[-2000:]}\n{err[-2000:]}")
    return result
