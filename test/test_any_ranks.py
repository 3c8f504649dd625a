"""-R ordered: the number of ranks does not change a bit, of log, parameters, m, v, masters (run_hash), and file."""

import itertools
import os
import shutil
import sys

import pytest
from conftest import LONG, run, slow
from train_lines import STREAM_MODES, check_ok, run_lines

ALL = os.environ.get("RUN_ALL") == "1"
BASE = "-I split -b 4 -d 48 -L 3 -C 67 -x 6 -l 3e-3 -R ordered -G 0.15"   # 12 micro-batches: 5 ranks do not divide them
SAVES = "-n 4"   # checkpoints of steps 4 and 6
POISON = "POISON=48,148,256"   # steps 2, 4 and 6 see a micro-batch that is not finite: first, in the middle, last of a round
KINDS = ["-P fp32", "-P bf16", "-P bf16 -w 0", "-U adamw -c 0.1 -P bf16", "-U sgd -l 0.05", "-U sgd -M 0 -l 0.05 -P bf16"]
PLANS = [f"-z {z} -K {k} -O {o}" for z, k, o in itertools.product(range(4), ("0", "unit", "0.01"), (0, 1))]


def runs(lines_of, ranks, folder):
    """{line: bits} of one rank count; lines: {name: command line}."""
    lines = list(lines_of.values())
    outcomes, _ = run_lines(lines, ranks, folder)
    check_ok(outcomes, lines)
    return dict(zip(lines_of, outcomes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each kind on one rank, in stage 0."""
    folder = tmp_path_factory.mktemp("alone")
    found = runs({kind: f"{POISON} {BASE} {SAVES} {kind} -z 0" for kind in KINDS}, 1, folder)
    for outcome in found.values():
        assert outcome.summary["skipped"] == 3 and outcome.log.count("\n") == 6
        assert outcome.log.count("norm:inf") == 3 and min(x for x in outcome.column("norm")) > 0.15, outcome.log
        assert len(outcome.files) == 2
    assert len({outcome.bits() for outcome in found.values()}) == len(KINDS)
    assert len({file for outcome in found.values() for file in outcome.files.values()}) == 2 * len(KINDS)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_one_run_at_any_number_of_ranks(ranks, alone, tmp_path):
    """Stages, buckets, overlap, types, optimizers, clip active, steps skipped on some of the ranks."""
    plans = PLANS if ranks in (2, 5) else PLANS[ranks % 2::2]
    lines = {(kind, plan): f"{POISON} {BASE} {SAVES} {kind} {plan}" for kind in KINDS[:3] for plan in plans}
    lines.update({(kind, plan): f"{POISON} {BASE} {SAVES} {kind} {plan}" for kind in KINDS[3:] for plan in PLANS[1::5]})
    for (kind, plan), outcome in runs(lines, ranks, tmp_path).items():
        assert outcome.bits() == alone[kind].bits(), f"{kind} {plan}: {outcome.log} {alone[kind].log}"
        assert outcome.files == alone[kind].files, f"{kind} {plan}"


LARGE = "-I split -b 2 -d 12 -L 3 -C 601 -x 2 -n 2 -R ordered"   # files of three to four pieces


@pytest.fixture(scope="module")
def large_alone(tmp_path_factory):
    return {kind: one.files for kind, one in runs({kind: f"{LARGE} {kind}" for kind in KINDS[:3]}, 1,
                                                  tmp_path_factory.mktemp("large")).items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_one_file_of_many_pieces(ranks, large_alone, tmp_path):
    """Slices larger and smaller than a piece of the file, buckets that end inside one."""
    plans = list(itertools.product(KINDS[:3], range(4), ("0", "unit", "0.05")))
    lines = {plan: "{} {} -z {} -K {}".format(LARGE, *plan) for plan in (plans if ALL else plans[ranks::7])}
    for plan, outcome in runs(lines, ranks, tmp_path).items():
        assert outcome.files == large_alone[plan[0]], plan
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("ranks", [2, 5, pytest.param(3, marks=slow)])
def test_in_any_order_of_streams(ranks, alone, tmp_path):
    plans = ["-z 0 -K 0.01", "-z 1 -K unit", "-z 2", "-z 3"]
    lines = {(mode, plan, kind): f"{mode} {POISON} {BASE} {kind} {plan}"
             for mode in STREAM_MODES[1:] for plan in plans for kind in KINDS[:2]}
    for (mode, plan, kind), outcome in runs(lines, ranks, tmp_path).items():
        assert outcome.bits() == alone[kind].bits(), f"{mode} {kind} {plan}"


@pytest.mark.parametrize("ranks", [3, 5])
def test_rounds_that_are_not_full(ranks, tmp_path):
    """Fewer micro-batches than ranks, one more than divides, -A step too; with -R nccl to rounding."""
    lines = {}
    for batches, kind in itertools.product((1, 2, ranks + 1, 2 * ranks - 1), ("-P fp32", "-P bf16")):
        base = f"-I split -b 3 -d {3 * batches} -L 2 -C 33 -x 4 -l 3e-3 {kind}"
        for z in range(4):
            lines[batches, kind, "ordered", z] = f"{base} -R ordered -z {z}"
            lines[batches, kind, "nccl", z] = f"{base} -R nccl -z {z} -K unit -A micro"
        for z in range(2):
            lines[batches, kind, "ordered step", z] = f"{base} -R ordered -A step -z {z}"
            lines[batches, kind, "nccl step", z] = f"{base} -R nccl -A step -z {z}"
        lines[batches, kind, "allreduce", 0] = f"{base} -R allreduce -z 0"
    one = runs({key: line for key, line in lines.items() if key[2:] == ("ordered", 0)}, 1, tmp_path / "one")
    for (batches, kind, how, z), outcome in runs(lines, ranks, tmp_path / "many").items():
        expected = one[batches, kind, "ordered", 0]
        if how == "ordered":
            assert outcome.bits() == expected.bits(), (batches, kind, z)
        limit = 2e-6 if kind == "-P fp32" else 3e-2
        for name in ("trl", "norm"):
            for a, b in zip(outcome.column(name), expected.column(name)):
                assert abs(a - b) <= limit * b, (batches, kind, how, z, name, a, b)


@pytest.mark.parametrize("kills, seed", [(4, 1), pytest.param(30, 2, marks=slow)])
def test_killed_and_started_on_other_ranks(kills, seed):
    """dev/chaos.py: whatever happened in between, the run is that of one rank."""
    result = run([sys.executable, "dev/chaos.py", "--kills", kills, "--seed", seed], timeout=LONG)
    assert f"{kills} kills, 0 hung" in result.out and result.out.rstrip().endswith("0 differences")
