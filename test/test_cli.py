"""The command line of train_mlp: bad input ends on all ranks in one line that names flag, value and range; never a hang,
never a crash."""

import itertools
import json
import os
import re
import stat

import pytest
from conftest import TOP, end, own_lines, run, start
from train_lines import run_lines

import launch  # dev/launch.py, found through conftest

TINY = "-L 2 -C 8 -b 2".split()

BAD = {  # arguments: words of the message
    "-Q 1": ["-Q", "unknown flag"],
    "--nonsense": ["--nonsense", "unknown flag"],
    "-b": ["-b", "missing"],
    "-b 0": ["-b 0", "1 to"],
    "-b -3": ["-b -3", "1 to"],
    "-b many": ["-b many", "whole number"],
    "-b 2.5": ["-b 2.5", "whole number"],
    "-b 99999999999999999999": ["-b 99999999999999999999", "1 to"],
    "-b 4x": ["-b 4x"],
    "-L 0": ["-L 0"],
    "-C 0": ["-C 0"],
    "-C -1": ["-C -1"],
    "-x 0": ["-x 0"],
    "-x nan": ["-x nan"],
    "-l fast": ["-l fast", "number"],
    "-l -1": ["-l -1", "0 to"],
    "-l nan": ["-l nan"],
    "-l inf": ["-l inf"],
    "-c -0.1": ["-c -0.1"],
    "-G -1": ["-G -1"],
    "-B1 1": ["-B1 1"],
    "-B2 1.5": ["-B2 1.5"],
    "-E 0": ["-E 0"],
    "-M 2": ["-M 2"],
    "-w 2": ["-w 2", "0 to 1"],
    "-O 2": ["-O 2", "0 to 1"],
    "-P fp16": ["-P fp16", "fp32|bf16"],
    "-U lion": ["-U lion", "adamw|adam|sgd"],
    "-I mine": ["-I mine", "recipe|own|split"],
    "-K big": ["-K big", "unit"],
    "-K -1": ["-K -1"],
    "-K 1e-7 -C 2000": ["-K 1e-07", "65536 buckets"],
    "-K unit -C 1 -L 100000": ["-K unit", "-L 100000", "65536 buckets"],
    "-pi fs": ["-pi fs", "-pf"],
    "-pi fs -pf /nowhere -pn 2": ["-pi fs", "-pf /nowhere", "No such file"],
    "-pr 1": ["-pr", "-pi fs"],
    "-pn 2": ["-pn", "-pi fs"],
    "-pi fs -pf /tmp -pn 2 -pr 2": ["-pr 2", "0 to 1"],
    "-pn 0": ["-pn 0", "1 to"],
    "-pg 65": ["-pg 65", "64"],
    "-l 1e-400": ["-l 1e-400"],
    "-b 4\n5": ["-b 4?5"],
    "-l 1e20 -c 1e20": ["lr 1e+20", "weight_decay 1e+20"],
    "-b 1000000000 -C 1 -L 1": ["-b 1000000000", "2 of 2 ranks"],
    "-d 3": ["-d 3", "multiple"],
    "-d 0": ["-d 0"],
    "-z 4": ["-z 4", "0 to 3"],
    "-z -1": ["-z -1", "0 to 3"],
    "-R rings": ["-R rings", "nccl|ordered|allreduce"],
    "-R allreduce -z 1": ["-R allreduce", "-z 1"],
    "-A macro": ["-A macro", "step|micro"],
    "-z 0 -R allreduce -A micro": ["-A micro", "allreduce"],
    "--memory 0": ["--memory 0", "1 to"],
    "-pi tcp": ["-pi tcp", "not in this version"],
    "-pi smoke": ["-pi smoke"],
    "-n 5": ["-n 5", "-o DIR"],
    "-n -1": ["-n -1", "0 to"],
    "-nk 3": ["-nk 3", "-n"],
    "-y 1": ["-y 1", "-o DIR"],
    "-y 2": ["-y 2", "0 to 1"],
    "-T /nowhere/trace.json": ["-T /nowhere/trace.json", "No such file"],
    "-S -1": ["-S -1"],
    "-S 4294967296": ["-S 4294967296"],
    "-C 1000000 -L 1000": ["-C 1000000", "-L 1000", "MB"],
    "-C 100000": ["-C 100000", "MB"],
    "-b 100000000 -C 1000": ["-b 100000000", "MB"],
    "-o /proc/nowhere": ["-o /proc/nowhere"],
    "-o /dev/null/x": ["-o /dev/null/x"],
}


def check_refused(result, words):
    assert result.code != 0
    ours = own_lines(result.err, "train_mlp")
    assert len(ours) == 1, result.err
    for word in words:
        assert word in ours[0], ours[0]
    assert "step 1" not in result.out


# Each of these ends a run of its own under mpirun: start-up flags, paths, memory, whatever is no word of a line. The
# others are only refused when they are read, and share one start of the ranks.
ALONE = [bad for bad in BAD if re.search(r"-p|-o|\n|-b$|-Q|-z 4|-T |-d 3|000|-n 5|-y 1", bad)]


def with_small_model(arguments):
    return ([] if "-C" in arguments.split() else TINY) + arguments.split(" ")


@pytest.mark.parametrize("arguments", ALONE)
def test_bad_input_is_one_line(arguments):
    ranks = None if "/nowhere" in arguments else 2
    check_refused(run(["./train_mlp", *with_small_model(arguments)], ranks=ranks, check=False), BAD[arguments])


def test_bad_values_name_flag_and_range(tmp_path):
    others = [bad for bad in BAD if bad not in ALONE]
    assert len(others) > 30
    outcomes, _ = run_lines([" ".join(with_small_model(bad)) for bad in others], 2, tmp_path)
    for bad, outcome in zip(others, outcomes):
        assert outcome.error is not None, f"{bad}: was accepted"
        for word in BAD[bad]:
            assert word in outcome.error, f"{bad}: {outcome.error}"


def test_long_paths():
    for length in (300, 5000):
        result = run(["./train_mlp"] + TINY + ["-o", "/tmp/" + "x" * length], ranks=1, check=False)
        check_refused(result, ["-o /tmp/xxx"])


def test_a_directory_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("")
        target = tmp_path / "file" / "out"  # root may write anywhere, but not below a file
    else:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        target = tmp_path / "out"
    check_refused(run(["./train_mlp"] + TINY + ["-o", str(target)], ranks=2, check=False), ["-o ", "out"])


def test_a_full_disk_is_noticed(tmp_path):
    os.symlink("/dev/full", tmp_path / "main.log")
    result = run(["./train_mlp"] + TINY + ["-o", str(tmp_path)], ranks=2, check=False)
    assert result.code != 0 and "main.log" in result.err and "No space left" in result.err


def test_help_names_every_flag_of_the_design():
    out = run(["./train_mlp", "--help"], ranks=2).out
    for flag in ("-b -d -x -l -c -w -z -o -n -nk -y -pi -ps -pf -pn -pr -pg -L -C -P -U -B1 -B2 -E -M -G -S -K -R -A -O -I "
                 "-T -H --plan").split():
        assert re.search(rf"^ +{re.escape(flag)} ", out, re.M), flag
    assert out.count("usage:") == 1


def test_plan_stops_before_training():
    out = run(["./train_mlp", "--plan"], ranks=2).out
    assert "this run" in out and "step 1" not in out
    rows = [line.split() for line in out.splitlines() if re.match(r" +[01] ", line)]
    assert [int(row[1]) for row in rows[:11]] == [2**k for k in range(11)]
    state = {(int(row[0]), int(row[1])): float(row[4]) for row in rows}
    outside = {int(row[1]): float(row[6]) for row in rows}
    assert outside[1] == 500 and {outside[2**k] for k in range(1, 11)} == {1200}, "CUDA's context; and NCCL's buffers"
    assert abs(state[1, 2] / state[0, 2] - 0.5) < 1e-3 and abs(state[1, 64] / state[0, 64] - 1 / 64) < 1e-3


def test_plan_has_a_line_for_this_run():
    out = run(["./train_mlp", "--plan", "-z", "2"], ranks=3).out
    ranks = [int(line.split()[1]) for line in out.splitlines() if re.match(r" +2 ", line)]
    assert ranks == [1, 2, 3] + [2**k for k in range(2, 11)]
    assert re.search(r"^ +2 +3 .*this run$", out, re.M)


def test_plan_of_models_that_cannot_be_laid_out():
    """More buckets than there may be: of the layers given, a line in words; of the largest -L, simply too many layers."""
    out = run(["./train_mlp", "--plan", "-K", "0.05"], ranks=1).out
    assert len(re.findall(r"^ +[0-3] +\d+ ", out, re.M)) == 44
    largest = next(int(line.split()[-1]) for line in out.splitlines() if re.match(r" +2 +1 ", line))
    assert largest == 65536 // 321, "a layer has 321 buckets of 49,920 bytes"
    out = run(["./train_mlp", "--plan", "-C", "1", "-L", "65537", "--memory", "1300"], ranks=1).out
    assert len(re.findall(r"^ +[0-3] +\d+ ", out, re.M)) == 44
    assert len(re.findall("65537 units apart are more than 65536 buckets", out)) == 22


def test_the_last_of_a_repeated_flag_wins(tmp_path):
    run(["./train_mlp"] + TINY + ["-x", "7", "-x", "2", "-o", str(tmp_path)], ranks=1)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_nothing_is_written_without_o(tmp_path):
    run([str(TOP / "train_mlp")] + TINY, ranks=2, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_summary_and_log_have_the_fields_of_the_design(tmp_path):
    run(["./train_mlp"] + TINY + ["-x", "3", "-o", str(tmp_path / "a" / "b")], ranks=2)
    summary = json.loads((tmp_path / "a/b/summary.json").read_text())
    assert set(summary) == set("ranks stage steps skipped loss norm params_sum params_hash run_hash peak_mb "
                               "optimizer_state_mb step_ms exposed_ms".split())
    assert len(summary["peak_mb"]) == 4 and re.fullmatch(r"[0-9a-f]{16}", summary["params_hash"])
    lines = (tmp_path / "a/b/main.log").read_text().splitlines()
    assert [re.fullmatch(r"s:(\d) trl:\S+ lr:0\.01 norm:\S+", line).group(1) for line in lines] == ["1", "2", "3"]
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["main.log", "summary.json"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_combination_of_types_optimizers_reductions_and_stages(ranks, tmp_path):
    """Each works, or is refused in one line naming a flag."""
    combinations = list(itertools.product(("fp32", "bf16"), "01", ("adam", "adamw", "sgd"), ("nccl", "ordered", "allreduce"),
                                          "0123"))
    lines = [f"-L 2 -C 8 -b 2 -P {p} -w {w} -U {u} -R {r} -z {z}" for p, w, u, r, z in combinations]
    outcomes, _ = run_lines(lines, ranks, tmp_path)
    for (_, _, _, r, z), line, outcome in zip(combinations, lines, outcomes):
        works = r != "allreduce" or z == "0"
        assert (outcome.error is None) == works, f"{line}: {outcome.error}"
        if not works:
            assert "-R allreduce: works with -z 0 only" in outcome.error


def start_over_folder(folder, ranks, flags, env=None):
    """train_mlp without mpirun: the ranks meet in a folder."""
    words = ["./train_mlp", "-pi", "fs", "-pf", folder, "-pn", ranks, *flags]
    return [start([*words, "-pr", rank], env) for rank in range(ranks)]


def test_ranks_that_meet_in_a_folder_train_the_same(tmp_path):
    flags = TINY + ["-I", "own", "-x", "3"]
    (tmp_path / "ranks").mkdir()
    processes = start_over_folder(tmp_path / "ranks", 2, flags + ["-o", str(tmp_path / "fs")])
    for process in processes:
        _, err = end(process)
        assert process.returncode == 0, err
    run(["./train_mlp"] + flags + ["-o", str(tmp_path / "mpi")], ranks=2)
    assert (tmp_path / "fs/main.log").read_text() == (tmp_path / "mpi/main.log").read_text()
    assert list((tmp_path / "ranks").iterdir()) == [], "the folder is clean again"


@pytest.mark.parametrize("death", ["reported", "silent"])
@pytest.mark.parametrize("stage, streams", [("1", "eager"), ("2", "lazy"), ("3", "eager"), ("3", "lazy"), ("3", "threads")])
def test_a_killed_rank_ends_the_others(tmp_path, stage, streams, death):
    """Case J1, without a launcher that would do it: the survivor ends by itself, non-zero, in words that say why, whether or
    not NCCL notices."""
    processes = start_over_folder(tmp_path, 2, TINY + ["-x", "1000000000", "-z", stage],
                                  {"CUDA_CPU_STREAMS": streams, "CUDA_CPU_NCCL_DEATH": death})
    for line in processes[0].stdout:
        if line.startswith("step 5/"):
            break
    processes[1].kill()
    _, err = end(processes[0])
    said = own_lines(err, "train_mlp: rank 0: ")
    assert processes[0].returncode != 0 and len(said) == 1, err
    assert "remote process exited" in said[0] or "rank 1 has died" in said[0], err


def test_accumulation_in_bf16_warns(tmp_path):
    """Case C7: sums over micro-steps in bf16 lose small parts; that is said."""
    assert "add up in bf16" in run(["./train_mlp", "-P", "bf16", "-d", "8"] + TINY, ranks=2).out
    assert "add up in bf16" not in run(["./train_mlp", "-P", "bf16"] + TINY, ranks=2).out


@pytest.mark.parametrize("first,second", [("-l 0.01", "-l 0.5"), ("-x 3", "-x 5"), ("-z 0", "-z 1"), ("-C 8", "-C 16"),
                                          ("-K 0", "-K unit"), ("--help", "-x 1"), ("--plan", "-x 1")])
def test_ranks_with_different_flags_are_refused(first, second):
    command = ["-n", "1", "./train_mlp"] + TINY + first.split() + [":", "-n", "1", "./train_mlp"] + TINY + second.split()
    result = run(launch.command(1, ["X"])[:1] + ["--oversubscribe"] + command, check=False)
    check_refused(result, ["rank 1", "rank 0"])
    assert any(words.split()[0] in result.err for words in (first, second))


def test_a_failed_run_leaves_no_older_summary(tmp_path):
    run(["./train_mlp"] + TINY + ["-o", str(tmp_path)], ranks=1)
    assert (tmp_path / "summary.json").exists()
    flags = ["-U", "sgd", "-l", "1e25", "-I", "own", "-x", "50", "-o", str(tmp_path)]
    assert run(["./train_mlp"] + TINY + flags, ranks=1, check=False).code != 0
    assert not (tmp_path / "summary.json").exists()


def test_output_that_cannot_be_written_is_an_error():
    for flags in (["--help"], TINY):
        result = run(["bash", "-c", "./train_mlp \"$@\" >/dev/full", "bash"] + flags, check=False)
        assert result.code != 0 and "standard output" in result.err


def test_one_rank_that_cannot_join_ends_all():
    """A rank that fails in ncclCommInitRank takes along the others, which wait for it there."""
    command = ["-n", "1", "./train_mlp", *TINY, ":",
               "-n", "1", "env", "CUDA_CPU_FAIL=ncclCommInitRank:1", "./train_mlp", *TINY]
    result = run(launch.command(1, ["X"])[:1] + ["--oversubscribe"] + command, check=False)
    said = own_lines(result.err, "train_mlp: rank 1: ")
    assert result.code != 0 and any("ncclCommInitRank" in line for line in said), result.err
