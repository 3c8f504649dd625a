"""Ranks that die or hang: the others end by themselves, with a line that says rank, step, operation and seconds, whether or
not NCCL notices. What is only slow is no death."""

import itertools
import os
import re
import shutil
import signal
import time

import pytest
import launch
from conftest import end, own_lines, start
from test_checkpoint import path_of, start_ranks, steps_in, wait_for_step
from test_file_calls import client  # noqa: F401 (a fixture)

ALL = os.environ.get("RUN_ALL") == "1"
FLAGS = "-L 3 -C 100 -I split -x 6 -n 3 -W 5"
# moment: where a rank is hit (CUDA_CPU_FAIL), further flags, and what the others may be at then
MOMENTS = {
    "start-up": ("ncclCommInitRank:1", "", "ncclCommInitRank"),
    "set-up": ("cudaMalloc:5", "", "set-up"),
    "check of saves": ("cudaMallocHost:3", "", "check of saves"),
    "forward": ("cublasLtMatmul:19", "", "step 3, "),
    "backward": ("cublasLtMatmul:23", "", "step 3, "),
    "reduce": ("ncclReduceScatter:2", "", "step 2, "),
    "norm": ("ncclAllReduce:2", "", "step 2, "),
    "slots": ("cublasLtMatmul:20", "-z 3", "step 3, "),
    "save": ("cudaMallocHost:5", "", "step 3, save"),
    "load": ("cudaMallocHost:3", "-y 1", "load"),
}
CASES = list(itertools.product(MOMENTS, ("kill", "stop"), ("silent", "reported"), ("fs", "mpi")))
SHORT = [case for i, case in enumerate(CASES) if case[1:] == (("kill", "stop")[i // 8 % 2], "silent", "fs")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert end(start(["./train_mlp", *f"{FLAGS} -x 3".split(), "-o", folder]))[1] == ""
    return folder


def start_victim(flags, start_by, where, death, hit):
    """Two ranks, the last of which is hit. Returns the processes that end by themselves, and the others."""
    env = {"CUDA_CPU_NCCL_DEATH": death}
    words = ["./train_mlp", *flags.split()]
    if start_by == "mpi":
        command = [*launch.command(1, ["X"])[:1], "--oversubscribe", "-np", "1", *words, ":", "-np", "1",
                   "env", f"CUDA_CPU_FAIL={hit}", *words]
        return [start(command, env)], []
    where.mkdir()
    words += ["-pi", "fs", "-pf", where, "-pn", 2]
    return [start([*words, "-pr", 0], env)], [start([*words, "-pr", 1], {**env, "CUDA_CPU_FAIL": hit})]


@pytest.mark.parametrize("moment, what, death, start_by", CASES if ALL else SHORT)
def test_a_rank_that_dies_or_hangs(moment, what, death, start_by, saved, tmp_path):
    hit, flags, at = MOMENTS[moment]
    if "-y 1" in flags:
        shutil.copytree(saved, tmp_path / "run")
    begin = time.monotonic()
    processes, victims = start_victim(f"{FLAGS} {flags} -o {tmp_path / 'run'}", start_by, tmp_path / "meet", death,
                                      f"{hit}:{what}")
    out, err = end(processes[0])
    print(f"{moment}, {what}, {death}, {start_by}: {time.monotonic() - begin:.1f} s: {err.strip()[-200:]}")
    for victim in victims:
        victim.kill()
        victim.communicate()
    assert processes[0].returncode != 0
    said = own_lines(err, "train_mlp: rank 0: ")
    if start_by == "fs" or what == "stop":   # a killed rank's mpirun may end the others before they say something
        assert len(said) == 1 and re.search(r"\d+\.\d s without progress: ", said[0]) and at in said[0], err
    assert not steps_in(tmp_path / "run") or steps_in(tmp_path / "run") == [3]


def test_three_ranks_hear_of_it_one_from_the_other(tmp_path):
    """Each looks at the next one only; who has found it leaves word."""
    processes = start_ranks("-L 2 -C 60 -I split -x 1000000 -W 300", 3, tmp_path / "meet", {"CUDA_CPU_NCCL_DEATH": "silent"})
    wait_for_step(processes[0], 3)
    processes[1].kill()
    said = [own_lines(end(processes[rank])[1], f"train_mlp: rank {rank}: step ") for rank in (0, 2)]
    assert all(len(lines) == 1 for lines in said)
    assert any("rank 1 has died" in lines[0] for lines in said)


def test_a_rank_that_leaves_before_all_have_met(tmp_path):
    """Case R3: who waits for a third rank hears that the second is gone, or was started for another number of ranks."""
    meet = tmp_path / "meet"
    meet.mkdir()
    words = ["./train_mlp", "-pi", "fs", "-pf", meet]
    first, second = (start([*words, "-pn", 3, "-pr", rank]) for rank in (0, 1))
    while not list(meet.glob("*.hello.1")):
        time.sleep(0.01)
    time.sleep(0.5)
    second.kill()
    assert "rank 1 was there and left before all had met" in end(first)[1] and first.returncode == 1
    shutil.rmtree(meet)
    meet.mkdir()
    processes = [start([*words, "-pn", number, "-pr", rank]) for rank, number in enumerate((3, 2, 3))]
    outputs = [end(process)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1]
    assert all("was started for" in err or "left before all had met" in err for err in outputs), outputs


# ----------------------------------------------------------------------------- slow is not dead

def test_a_slow_save_is_no_death(client, tmp_path):   # noqa: F811
    """The disk of one rank takes longer for its part than -W says, but gets on."""
    meet = tmp_path / "meet"
    meet.mkdir()
    words = ["./train_mlp", *f"-L 3 -C 1900 -I split -x 1 -n 1 -W 5 -pi fs -pf {meet} -pn 2 -o {tmp_path / 'run'}".split()]
    processes = [start([*words, "-pr", rank], client(DELAY=400) if rank else None) for rank in range(2)]
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert float(re.search(r"^saved .* in (\S+) s", outputs[0][0], re.M)[1]) > 6


def test_a_slow_step_is_no_death(tmp_path):
    batches = 800
    while True:
        out, err = end(start([*launch.command(2, ["./train_mlp"]), *f"-L 2 -C 100 -b 1 -d {batches} -I split -W 3".split()],
                             {"CUDA_CPU_NCCL_DEATH": "silent"}))
        assert "params hash" in out, err
        if float(re.search(r" (\S+) ms \| exposed", out)[1]) > 4500:
            return
        batches *= 3


# ----------------------------------------------------------------------------- signals, streams, descriptors

LONG_RUN = "-L 2 -C 60 -I split -x 1000000 -n 500000"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends(number, tmp_path):
    processes = start_ranks(f"{LONG_RUN} -o {tmp_path / 'run'}", 2, tmp_path / "meet")
    wait_for_step(processes[0], 3)
    processes[1].send_signal(number)
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "stopped by a signal after step" in outputs[0][0] and len(steps_in(tmp_path / "run")) == 1


def test_a_second_signal_ends_at_once(tmp_path):
    """Case R8: the first waits for a peer that is stuck."""
    processes = start_ranks(f"{LONG_RUN} -o {tmp_path / 'run'}", 2, tmp_path / "meet", {"CUDA_CPU_NCCL_DEATH": "silent"})
    wait_for_step(processes[0], 3)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    processes[0].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert processes[0].poll() is None
    processes[0].send_signal(signal.SIGTERM)
    err = end(processes[0])[1]
    assert processes[0].returncode == 128 + signal.SIGTERM and "a second signal" in err
    processes[1].kill()


def test_the_reader_of_standard_output_goes(tmp_path):
    """Case N23: the run goes on, and its log is whole."""
    command = f"./train_mlp -L 2 -C 60 -I split -x 50 -n 50 -o {tmp_path / 'run'}; echo $? >{tmp_path / 'code'}"
    out, _ = end(start(["bash", "-c", f"({command}) | head -n 2"]))
    assert out.count("\n") == 2 and (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "run/main.log").read_text().count("\n") == 50 and path_of(tmp_path / "run", 50).exists()


def test_closed_standard_descriptors(tmp_path):
    """Case R6: nothing of ours lands in a file that has taken their number."""
    (tmp_path / "meet").mkdir()
    flags = f"-L 2 -C 60 -I split -x 5 -n 5 -pi fs -pf {tmp_path / 'meet'} -pn 2 -o {tmp_path / 'run'}"
    processes = [start(["bash", "-c", f"exec ./train_mlp {flags} -pr {rank} <&- >&- 2>&-"]) for rank in range(2)]
    for process in processes:
        end(process)
    assert [process.returncode for process in processes] == [0, 0]
    assert steps_in(tmp_path / "run") == [5] and not list((tmp_path / "meet").iterdir())


@pytest.mark.parametrize("flag", ["-o", "-T"])
def test_a_flag_that_one_rank_lacks(flag, tmp_path):
    words = ["./train_mlp", "-L", "2", "-C", "8"]
    mpirun = [*launch.command(1, ["X"])[:1], "--oversubscribe"]
    command = [*mpirun, "-n", "1", *words, ":", "-n", "1", *words, flag, tmp_path / "x"]
    process = start(command)
    err = end(process)[1]
    assert process.returncode != 0 and f"{flag}: rank 1" in err
