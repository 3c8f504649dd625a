"""What earlier versions left behind keeps working.

test/data/version_N: made by the version with LLMC_ZERO_VERSION N. fp32, masters and stochastic are runs of six steps by
    mpirun -np 2 ./train_mlp -L 2 -C 9 -b 3 -d 12 -x 6 -n 3 -l 1e-3 -z 1 -I split -G 0.5
with -P fp32, with -P bf16 -U adamw -c 0.1, and with -P bf16 -w 0: the log, and the checkpoint of step 3.
"""

import re
import shutil

import pytest
from conftest import TOP, run
from train_lines import check_ok, run_lines

VERSIONS = sorted((TOP / "test/data").glob("version_*"))
KINDS = {"fp32": "-P fp32", "masters": "-P bf16 -U adamw -c 0.1", "stochastic": "-P bf16 -w 0"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("old", VERSIONS, ids=lambda path: path.name)
def test_a_checkpoint_goes_on(old, ranks, tmp_path):
    """From step 3 to 6, on any number of ranks and in any stage, as that version itself did: to rounding, because the
    processor's matrix products and the order of sums are others."""
    cases = [(kind, stage) for kind in KINDS for stage in range(4)]
    for i, (kind, _) in enumerate(cases):
        shutil.copytree(old / kind, tmp_path / f"line{i}")
    lines = [f"-L 2 -C 9 -b {12 // ranks} -d 12 -x 6 -l 1e-3 -I split -G 0.5 -y 1 -z {stage} {KINDS[kind]}"
             for kind, stage in cases]
    outcomes, printed = run_lines(lines, ranks, tmp_path)
    check_ok(outcomes, lines)
    assert printed.count("resumed from step 3") == len(lines), printed[-3000:]
    for (kind, stage), outcome in zip(cases, outcomes):
        text = (old / kind / "main.log").read_text()
        for name in ("trl", "norm"):
            theirs = [float(x) for x in re.findall(rf"{name}:(\S+)", text)]
            assert len(theirs) == 6 and outcome.column(name)[:3] == theirs[:3]
            worst = max(abs(a - b) / b for a, b in zip(outcome.column(name), theirs))
            assert worst < (1e-6 if kind == "fp32" else 1e-2), (kind, stage, name, worst)


@pytest.mark.parametrize("old", VERSIONS, ids=lambda path: path.name)
def test_the_tool_reads_it(old):
    files = sorted(old.glob("*/*.safetensors"))
    assert len(files) == len(KINDS)
    assert run([TOP / "dev/checkpoint.py", "verify", *files]).out.count(": whole") == len(files)
