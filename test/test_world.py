"""llmc_zero/world.cuh on real ranks: under mpirun and as plain processes that meet in a folder."""

import os
import re
import signal
import subprocess
import time

import pytest

from conftest import GIVE_UP, TOP, end, run, start
import launch

PROGRAM = TOP / "build" / "test" / "world_program"


@pytest.fixture(scope="module", autouse=True)
def program():
    """Built by the same rule as the unit tests, but it is not one."""
    subprocess.run(["make", str(PROGRAM.relative_to(TOP))], cwd=TOP, check=True, stdout=subprocess.DEVNULL)


def program_args(method, folder, ranks, rank, action, timeout=600, gpus=0):
    """timeout: how long a rank waits for another. By default longer than this test waits (GIVE_UP)."""
    return [PROGRAM, method, folder, ranks, rank, timeout, gpus, *action.split()]


def mpi_run(ranks, action, **options):
    if "ZERO_USE_MPI" not in (TOP / "build" / "flags").read_text():
        pytest.skip("built without MPI")
    return run(program_args("mpi", "-", 0, 0, action), ranks=ranks, **options)


class Rank:
    """One process of a folder run. Each has a NCCL_HOSTID of its own, so that they may share one GPU."""

    def __init__(self, folder, ranks, rank, action, method="fs", timeout=600, gpus=0, **env):
        args = program_args(method, folder, ranks, rank, action, timeout, gpus)
        self.process = start(args, {"NCCL_HOSTID": f"test{rank}", "NCCL_SOCKET_IFNAME": "lo", **env})

    def wait_for_line(self):
        """Until the program says on stderr that it is running."""
        for line in self.process.stderr:
            if line.startswith("running"):
                return

    def end(self):
        """Exit code, output and errors."""
        out, err = end(self.process)
        return self.process.returncode, out, err.strip()


def folder_run(folder, ranks, action, **options):
    """All ranks of one run, the last first: [(code, out, err), ...] in rank order."""
    ranks = [Rank(folder, ranks, rank, action, **options) for rank in reversed(range(ranks))]
    return [rank.end() for rank in reversed(ranks)]


# For a run that starts while the one before may still be leaving: how long that takes is the machine's affair.
PATIENT = {"WORLD_PATIENCE": "500"}


def kill_running(ranks):
    assert [rank.process.poll() for rank in ranks] == [None] * len(ranks)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.end()


def lines(out):
    return sorted(re.findall(r"^rank \d+ of \d+ local \d+ of \d+", out, re.M))


def expected(ranks):
    return [f"rank {r} of {ranks} local {r} of {ranks}" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mpi_ranks(ranks):
    assert lines(mpi_run(ranks, "ids").out) == expected(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("locks", [True, False])
def test_folder_ranks(ranks, locks, tmp_path):
    """Also LC21: these programs are built with MPI, never start it, and end with 0."""
    ended = folder_run(tmp_path, ranks, "ids", **({} if locks else {"WORLD_NO_LOCKS": "1"}))
    assert [code for code, _, _ in ended] == [0] * ranks, ended
    assert lines("".join(out for _, out, _ in ended)) == expected(ranks)
    assert os.listdir(tmp_path) == []


def test_tcp_is_refused_by_name():
    code, _, err = Rank("-", 2, 0, "ids", method="tcp").end()
    assert code == 1 and err == "start-up by tcp: not in this version; use mpi or fs"


def test_mpi_started_by_the_caller_stays():
    mpi_run(2, "caller")


@pytest.mark.parametrize("who, text", [("1", "rank 1: trouble of rank 1"), ("0", "rank 0: trouble of rank 0"),
                                       ("12", "rank 1: trouble of rank 1"), ("=", "all alike")])
def test_agree(who, text, tmp_path):
    """Every rank ends with 1 and says the same line."""
    for code, _, err in folder_run(tmp_path, 3, "fail " + who):
        assert (code, err) == (1, text)
    assert os.listdir(tmp_path) == []
    result = mpi_run(3, "fail " + who, check=False)
    assert result.code != 0 and result.err.splitlines().count(text) == 3


def test_abort(tmp_path):
    """LC22: one rank leaves with an error; the others do not wait."""
    ended = folder_run(tmp_path, 3, "abort 1")
    assert [code for code, _, _ in ended] == [3, 3, 3]
    assert ended[1][2] == "leaving on purpose"
    for rank in (0, 2):
        assert re.fullmatch(r"rank \d ended the run with code 3", ended[rank][2]), ended
    result = mpi_run(3, "abort 1", check=False)
    assert result.code != 0 and "leaving on purpose" in result.err


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_and_start_again(victim, tmp_path):
    """J1 and H3: kill -9 of one rank ends the other; the folder is good for the next run at once."""
    ranks = [Rank(tmp_path, 2, rank, "gather") for rank in (1, 0)][::-1]
    ranks[1].wait_for_line()
    ranks[victim].process.send_signal(signal.SIGKILL)
    again = [Rank(tmp_path, 2, rank, "ids", **PATIENT) for rank in (1, 0)]
    code, _, err = ranks[1 - victim].end()
    assert code == 3 and f"rank {victim} has died" in err
    for rank in again:
        assert rank.end()[0] == 0
    ranks[victim].end()
    assert os.listdir(tmp_path) == []


def test_kill_both_and_start_again(tmp_path):
    for ranks in (3, 2):
        running = [Rank(tmp_path, ranks, rank, "gather") for rank in range(ranks)]
        running[0].wait_for_line()
        for rank in running:
            rank.process.kill()
        ended = folder_run(tmp_path, 2, "ids", **PATIENT)
        assert [code for code, _, _ in ended] == [0, 0], ended
        for rank in running:
            rank.end()
    assert [name for name in os.listdir(tmp_path) if "hello.2" not in name] == []


def test_killed_without_locks(tmp_path):
    """Without locks the time limit ends it: that of rank 0, once both have met."""
    ranks = [Rank(tmp_path, 2, rank, action, WORLD_NO_LOCKS="1") for rank, action in ((0, "gather 2"), (1, "gather"))]
    ranks[0].wait_for_line()
    ranks[1].process.kill()
    code, _, err = ranks[0].end()
    assert code == 3 and "no word from rank 1 within 2 s" in err
    ranks[1].end()
    ended = folder_run(tmp_path, 2, "ids", WORLD_NO_LOCKS="1")
    assert [code for code, _, _ in ended] == [0, 0], ended


def test_runs_one_after_another(tmp_path):
    """The next run starts while the last one's other ranks may still be leaving."""
    late = []
    for _ in range(8):
        ranks = [Rank(tmp_path, 3, rank, "ids", **PATIENT) for rank in range(3)]
        assert ranks[0].end()[0] == 0
        late += ranks[1:]
    assert [rank.end()[0] for rank in late] == [0] * 16
    assert os.listdir(tmp_path) == []


def test_two_jobs_in_one_folder(tmp_path):
    """Job a runs all the time while job b starts, works and ends."""
    a = [Rank(tmp_path, 2, rank, "gather", LLMC_ZERO_JOB="a") for rank in (0, 1)]
    a[0].wait_for_line()
    b = folder_run(tmp_path, 2, "ids", LLMC_ZERO_JOB="b")
    assert [code for code, _, _ in b] == [0, 0], b
    kill_running(a)
    assert [name for name in os.listdir(tmp_path) if ".b." in name] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_running_rank_keeps_its_place(rank, tmp_path):
    running = [Rank(tmp_path, 2, r, "gather") for r in (0, 1)]
    running[0].wait_for_line()
    code, _, err = Rank(tmp_path, 2, rank, "ids").end()
    assert code == 1 and f"rank {rank} is taken by process {running[rank].process.pid} on host" in err
    kill_running(running)


@pytest.mark.parametrize("locks", [True, False])
def test_same_rank_twice(locks, tmp_path):
    """One of the two leaves with a line; the other one waits, and runs when rank 0 is there."""
    env = {} if locks else {"WORLD_NO_LOCKS": "1"}
    twice = [Rank(tmp_path, 2, 1, "ids", **env) for _ in range(2)]
    until = time.monotonic() + GIVE_UP
    while all(rank.process.poll() is None for rank in twice):
        assert time.monotonic() < until, "both wait"
        time.sleep(0.02)
    first = Rank(tmp_path, 2, 0, "ids", **env)
    ended = sorted(rank.end() for rank in twice)
    assert [code for code, _, _ in ended] == [0, 1] and first.end()[0] == 0, ended
    assert "same rank twice" in ended[1][2] and "\n" not in ended[1][2]


@pytest.mark.parametrize("args, text", [
    ((2, 2), "rank 2 of 2 ranks: it must be 0 to 1"), ((0, 0), "0 ranks"), ((2, -1), "rank -1 of 2 ranks"),
    ((2, 0), "missing: rank 1")])
def test_bad_start(args, text, tmp_path):
    code, _, err = Rank(tmp_path, *args, "ids", timeout=0.5).end()
    assert code == 1 and text in err and "\n" not in err


@pytest.mark.parametrize("folder, text", [
    ("/nonexistent", "No such file or directory"), ("/" + "x" * 300, "File name too long"),
    ("/" + "x" * 5000, "has 5001 characters")])
def test_bad_folder(folder, text):
    """LC32 among them."""
    for code, _, err in folder_run(folder, 2, "ids"):
        assert code == 1 and text in err and "\n" not in err


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_device(ranks, tmp_path):
    ended = folder_run(tmp_path, ranks, "device")
    assert [code for code, _, _ in ended] == [0] * ranks, ended
    assert all("device -1" not in out for _, out, _ in ended)


@pytest.mark.parametrize("visible, text", [("0", "2 ranks on host .*, 1 visible GPU:"),
                                           ("", "2 ranks on host .*, 0 visible GPUs: "),
                                           ("3000", "2 ranks on host .*, 0 visible GPUs: ")])
def test_more_ranks_than_gpus(visible, text, tmp_path):
    """H2: the same line on all ranks, before NCCL."""
    env = {"CUDA_VISIBLE_DEVICES": visible, "NCCL_HOSTID": None, "NCCL_MULTI_RANK_GPU_ENABLE": None}
    for code, _, err in folder_run(tmp_path, 2, "device", **env):
        assert code == 1 and re.match(text, err) and "\n" not in err
    assert os.listdir(tmp_path) == []
    result = mpi_run(2, "device", env=env, check=False)
    assert result.code != 0 and len(re.findall(text, result.err)) == 2


def test_more_gpus_asked_for_than_there_are(tmp_path):
    """LC20."""
    for code, _, err in folder_run(tmp_path, 2, "device", gpus=1000):
        assert code == 1 and "1000 GPUs per node were asked for" in err


def test_nccl_error_reaches_all_ranks(tmp_path):
    """H6: what NCCL says, on every rank."""
    if "cpu" not in (TOP / "build" / "flags").read_text():
        pytest.skip("needs CUDA_CPU_FAIL of the CPU build")
    for code, _, err in folder_run(tmp_path, 2, "device", CUDA_CPU_FAIL="ncclGetUniqueId:1"):
        assert code == 1 and err.startswith("rank 0: ncclGetUniqueId: ")


@pytest.mark.parametrize("action, death", [("loop", "reported"), ("loop", "silent"), ("stuck", "reported")])
def test_kill_during_wait(action, death, tmp_path):
    """J1, in a folder: the survivor ends, and long before its time limit, whether or not NCCL sees the dead peer."""
    ranks = [Rank(tmp_path, 2, rank, action, CUDA_CPU_NCCL_DEATH=death) for rank in (0, 1)]
    for rank in ranks:
        rank.wait_for_line()
    ranks[1].process.kill()
    code, _, err = ranks[0].end()
    assert code not in (0, None) and err
    assert (action, death) == ("loop", "reported") or err == "rank 1 has died or left without a word"
    ranks[1].end()


def test_wait_ends_at_the_time_limit(tmp_path):
    (code, _, err), = folder_run(tmp_path, 1, "stuck", timeout=1)
    assert code == 3 and "a stream is not done after 1 s" in err


def test_kill_during_wait_under_mpirun():
    mpi_run(1, "ids")
    share_a_gpu = 'NCCL_HOSTID=test$OMPI_COMM_WORLD_RANK NCCL_SOCKET_IFNAME=lo exec "$0" "$@"'
    args = launch.command(2, ["bash", "-c", share_a_gpu, *program_args("mpi", "-", 0, 0, "loop")])
    process = start(args)
    pid = int(next(line for line in process.stderr if line.startswith("running")).split()[1])
    os.kill(pid, signal.SIGKILL)
    end(process)
    assert process.returncode != 0
