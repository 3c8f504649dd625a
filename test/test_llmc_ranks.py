"""The small trainer with -R ordered: the number of ranks changes no bit of its log, model file, run hash and checkpoint."""

import hashlib
import itertools
import re
import shutil

import pytest

from test_llmc_runs import Outcome, header_of, program, run_lines  # noqa: F401 (program is a fixture)

# 12 micro-batches a step, 7 of the last line: 5 ranks divide neither. Shuffled data; a file ends in step 8 at the latest.
BASE = "-b 2 -t 9 -d 216 -x 9 -n 9 -i 1 -r 1 -m 7 -R ordered -l 0.02"
KINDS = {"fp32": ["", "-d 126", "-m -1 -x 2 -n 2"], "bf16": ["", "-w 0"]}
PLANS = [f"-z {z} -K {k} -O {o}" for z, (k, o) in itertools.product(range(4), (("unit", 1), ("0.01", 0)))]


def bits(outcome):
    """What has to be equal. main.log has lines of training, validation and questions."""
    run_hash = re.findall(r"run hash: ([0-9a-f]{16})", outcome.out)
    step = max(int(path.name[5:13]) for path in outcome.folder.glob("step_*.safetensors"))
    assert len(run_hash) == 1 and " tel:" in outcome.log and " eval:" in outcome.log and "trl:" in outcome.log
    file = hashlib.sha256(outcome.checkpoint(step).read_bytes()).hexdigest()
    return outcome.log, outcome.model, run_hash, file


@pytest.fixture(scope="module", params=KINDS)
def alone(program, request, tmp_path_factory):   # noqa: F811
    lines = [f"{BASE} {kind} -z 0" for kind in KINDS[request.param]]
    outcomes = run_lines(program(request.param), 1, tmp_path_factory.mktemp("alone"), lines)
    assert len({outcome.bits for outcome in outcomes}) == len(lines)
    return request.param, dict(zip(KINDS[request.param], map(bits, outcomes)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_one_run_at_any_number_of_ranks(program, alone, ranks, tmp_path):   # noqa: F811
    precision, expected = alone
    lines = [(kind, f"{BASE} {kind} {plan}") for kind in expected for plan in PLANS[ranks % 2::2]]
    outcomes = run_lines(program(precision), ranks, tmp_path, [line for _, line in lines])
    for (kind, line), outcome in zip(lines, outcomes):
        for found, wanted in zip(bits(outcome), expected[kind]):
            assert found == wanted, line


def test_a_resume_on_other_ranks_goes_on_with_the_next_samples(program, alone, tmp_path):   # noqa: F811
    """4 ranks, then 3, 1, 5, in other stages; files end in between. The log has every line once."""
    precision, expected = alone
    folder = tmp_path / "run"
    for ranks, steps, plan in ((4, 2, "-z 2"), (3, 5, "-z 3 -K 0.01"), (1, 7, "-z 0"), (5, 9, "-z 1")):
        run_folder = tmp_path / f"{ranks} ranks, line 0"
        if folder.exists():
            shutil.copytree(folder, run_folder)
            (run_folder / "id").unlink()
        run_lines(program(precision), ranks, tmp_path, [f"{BASE} {plan} -x {steps} -n 1 -y 1"])
        shutil.rmtree(folder, ignore_errors=True)
        run_folder.rename(folder)
    found, wanted = bits(Outcome(folder)), expected[""]
    lines = found[0].splitlines()
    # each start validates at its first and last step: lines of steps where a run ended stand there although nobody asked
    asked = set(wanted[0].splitlines())
    assert [line for line in lines if "trl:" in line] == [line for line in wanted[0].splitlines() if "trl:" in line]
    assert asked <= set(lines)
    assert found[1:] == wanted[1:]


def test_other_reductions_keep_llm_cs_own_order(program, tmp_path):   # noqa: F811
    """Each rank draws its own order there, and counts batches by ranks."""
    line = BASE.replace("-R ordered", "-R nccl")
    one = run_lines(program("fp32"), 1, tmp_path, [line])[0]
    three = run_lines(program("fp32"), 3, tmp_path, [line])[0]
    ordered = run_lines(program("fp32"), 1, tmp_path / "ordered", [BASE])[0]
    assert one.log != three.log
    for a, b in zip(one.column("trl"), ordered.column("trl")):   # on one rank the order is the same
        assert abs(a - b) < 2e-3 * a
    assert len(header_of(three.checkpoint(9))[0]["__metadata__"]["llmc.batch"].split()) == 2
    states = [key for key in header_of(three.checkpoint(9))[0]["__metadata__"] if key.startswith("llmc.state.")]
    assert len(states) == 3


def test_from_llm_cs_order_to_the_global_one_and_back(program, tmp_path):   # noqa: F811
    """A run of -R nccl goes on with -R ordered and the other way round, on other ranks, from the same place."""
    folder = tmp_path / "3 ranks, line 0"
    run_lines(program("fp32"), 3, tmp_path, [BASE.replace("-R ordered", "-R nccl") + " -x 2 -n 2"])
    for ranks, flags in ((2, "-R ordered -x 4 -n 2"), (3, "-R nccl -x 6 -n 2"), (1, "-R nccl -x 8 -n 2")):
        there = tmp_path / f"{ranks} ranks, line 0"
        if there != folder:
            shutil.rmtree(there, ignore_errors=True)
            folder.rename(there)
            folder = there
        (folder / "id").unlink(missing_ok=True)
        outcome = run_lines(program("fp32"), ranks, tmp_path, [f"{BASE} {flags} -y 1"])[0]
        assert "resumed from step" in outcome.out
    assert len(Outcome(folder).column("trl")) == 8
