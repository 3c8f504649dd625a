"""Runs of train_mlp keep their bits from version to version: test/data/hashes.json (see hashes.py).

Matrix products by a plain loop and data without the C library's functions, so that the bits are those of every machine.
"""

import itertools

import hashes
import pytest
from train_lines import check_ok, run_lines

TYPES = ("-P fp32", "-P bf16", "-P bf16 -w 0")
SUMS = [(stage, reduction, accumulation) for stage, reduction, accumulation
        in itertools.product("0123", ("nccl", "ordered"), ("step", "micro"))
        if stage < "2" or accumulation == "micro"] + [("0", "allreduce", "step")]
OPTIMIZERS = ("-U adamw -c 0.1", "-U adam -c 0.1 -B1 0.8 -B2 0.95 -E 1e-6", "-U sgd -l 0.05", "-U sgd -M 0 -l 0.05")


def command_lines(ranks):
    lines = [f"-z {z} -R {r} -A {a} {kind}" for kind in TYPES for z, r, a in SUMS]
    lines += [f"-z {z} -R nccl {optimizer} {kind}" for optimizer in OPTIMIZERS for kind in TYPES for z in "013"]
    lines += [f"-z {z} -R nccl {buckets}" for z in "013" for buckets in ("-K 0.004", "-K unit")]
    return [f"{line} -d {6 * ranks}" for line in lines]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_runs_keep_their_bits(ranks, tmp_path):
    lines = command_lines(ranks)
    common = "CUDA_CPU_BLAS=loop -L 2 -C 37 -b 3 -x 4 -l 3e-3 -G 0.2 -I split -n 4"
    outcomes, _ = run_lines([f"{common} {line}" for line in lines], ranks, tmp_path)
    check_ok(outcomes, lines)
    found = {}
    for i, (line, outcome) in enumerate(zip(lines, outcomes)):
        norms = outcome.column("norm")
        assert max(norms) > 0.2, f"{line}: the clip must be active"
        file = hashes.of_tensors(tmp_path / f"line{i}/step_00000004.safetensors")
        found[line] = f"{outcome.summary['params_hash']} {outcome.log.split('trl:')[-1].split()[0]} {norms[-1]} {file}"
    hashes.check(f"train_mlp, {ranks} ranks", found)
