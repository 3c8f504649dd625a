"""What the test files share: running a program on several ranks, and a setting that is the same for everybody.

    result = run(["./train_mlp", "-z", "1"], ranks=2)      # asserts exit code 0 unless check=False
    result.code, result.out, result.err
    process = start(["./train_mlp"])                       # goes on meanwhile
    out, err = end(process)

GIVE_UP: seconds after which a test gives up on a program that does not end. The machine may be loaded, so it is minutes,
and no test asks how long something took. It is less than the programs wait for one another (600 s, and an hour in the
CPU build's NCCL): what has ended by then has ended by itself, and the test looks at what it said. LONG is for builds and
for long lists of runs.

The environment: of what the caller's shell has set only the names in KEPT reach the tests and what they start.
slow marks tests that only `make test-all` runs (RUN_ALL=1).
"""

import contextlib
import locale
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "dev"))
import launch

KEPT = re.compile("|".join([
    "PATH|HOME|USER|LOGNAME|TMPDIR|PYTEST_.*|RUN_ALL|LLMC_DIR|HASHES",
    # what to build with, and how
    "DEVICE|NO_MPI|JOBS|ARCH|NVCC|MPICC|NCCL_HOME|CUDA_HOME|CC|CXX|CUDA_CPU_(SANITIZE|MARCH)|.*SAN_OPTIONS",
    # where things are
    "CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH|LD_RUN_PATH|LD_LIBRARY_PATH|CONDA_PREFIX",
    "(OPAL|PMIX|PRTE)_PREFIX|(OMPI|PMIX|PRTE)_MCA_.*",
    # which GPUs, and how they reach each other
    "CUDA_VISIBLE_DEVICES|NCCL_.*_DISABLE|NCCL_SOCKET_IFNAME",
    # the network, for dev/deps.sh
    "PIP_.*|.*_proxy|.*_PROXY|SSL_CERT_.*|.*_CA_BUNDLE"]))
for name in [name for name in os.environ if not KEPT.fullmatch(name)]:
    del os.environ[name]
if re.search(r"\s", os.environ.get("TMPDIR", "")):      # lines for train_program are split at spaces
    del os.environ["TMPDIR"]
    tempfile.tempdir = None
os.environ.update(LC_ALL="C", COLUMNS="120", CUDA_CPU_TIMEOUT="3600")
os.umask(0o022)
with contextlib.suppress(locale.Error):     # else what Python was started with stays: files are read as UTF-8
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

GIVE_UP, LONG = 500, 3600
Result = namedtuple("Result", "code out err")
slow = pytest.mark.skipif(os.environ.get("RUN_ALL") != "1", reason="slow: make test-all")


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("timeout"):      # should a test itself wait for ever
            item.add_marker(pytest.mark.timeout(4 * LONG))


started = []


def start(args, env=None, cwd=TOP):
    """Starts args; env adds variables (a value of None removes one). What is still running when the test ends is killed."""
    process = subprocess.Popen([str(arg) for arg in args], cwd=cwd, env=launch.environment(env), text=True, errors="replace",
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    started.append(process)
    return process


def end(process, timeout=GIVE_UP):
    """What a started process printed, (stdout, stderr), when it has ended by itself. Else it is killed, with all that it
    has started, and the test fails."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        return pytest.fail(f"no end after {timeout} s: {process.args}\n{out[-2000:]}\n{err[-2000:]}")


def kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nothing_keeps_running():
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            kill_group(process)
            process.communicate()


def run(args, ranks=None, timeout=GIVE_UP, env=None, cwd=TOP, check=True):
    """Runs args in the project's top folder, on `ranks` ranks under mpirun, or as they are if ranks is None.
    check=False accepts any exit code."""
    command = launch.command(ranks, args)
    process = start(command, env, cwd)
    out, err = end(process, timeout)
    if check and process.returncode != 0:
        pytest.fail(f"exit code {process.returncode}: {' '.join(command)}\n{out[-2000:]}\n{err[-2000:]}")
    return Result(process.returncode, out, err)


def own_lines(text, *begins):
    """The lines that begin as our program's do: mpirun, hwloc, bash, matplotlib add lines of their own."""
    return [line for line in text.splitlines() if line.startswith(begins)]
