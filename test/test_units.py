"""Runs the unit programs that the Makefile builds from test/test_*.cu; those that exchange data on 1 to 4 ranks."""

import os
import re

import pytest
from conftest import LONG, TOP, run, slow

MANY_RANKS = (1, 2, 3, *((4,) if os.environ.get("RUN_ALL") == "1" else ()))
ON_RANKS = {"test_optimizer": MANY_RANKS, "test_stages": MANY_RANKS, "test_steps": MANY_RANKS, "test_checkpoint": (1,)}
PROGRAMS = sorted(path.stem for path in (TOP / "test").glob("test_*.cu"))
PROGRAMS += [name + "_fast" for name in ("test_adamw", "test_grad_norm", "test_reduce") if name in PROGRAMS]
IN_OTHER_ORDERS = ("test_grad_norm", "test_adamw", "test_reduce")
CASES = [(name, ranks) for name in PROGRAMS for ranks in ON_RANKS.get(name, (None,))]


def check_passed(out):
    """Some tests ran, and all of them passed."""
    assert re.search(r"\[  PASSED  \] [1-9]", out) and "[  FAILED  ]" not in out, out[-3000:]


@pytest.mark.parametrize("order", ["rev", pytest.param("rand:7", marks=slow)])
@pytest.mark.parametrize("name", [name for name in IN_OTHER_ORDERS if name in PROGRAMS])
def test_unit_with_warps_and_blocks_in_another_order(name, order):
    """A missing __syncthreads, or a block that relies on an earlier one, gives other numbers."""
    result = run([str(TOP / "build/test" / name)], timeout=LONG, env={"CUDA_CPU_SCHED": order})
    check_passed(result.out)


@pytest.mark.parametrize("name,ranks", CASES)
def test_unit(name, ranks):
    result = run([str(TOP / "build/test" / name)], ranks=ranks, timeout=LONG)
    check_passed(result.out)


def test_ordered_sums_on_8_ranks():
    result = run([str(TOP / "build/test/test_stages"), "--gtest_filter=*.Ordered*"], ranks=8, timeout=LONG)
    check_passed(result.out)
    assert "rms error of sums over 8 ranks" in result.out


@pytest.mark.parametrize("ranks,tests", [(8, "Checkpoint.Any*:Checkpoint.TheFile*:Checkpoint.ADamaged*"),
                                         *(pytest.param(ranks, "*", marks=slow) for ranks in (2, 3, 4))])
def test_checkpoint_on_more_ranks(ranks, tests):
    result = run([str(TOP / "build/test/test_checkpoint"), f"--gtest_filter={tests}"], ranks=ranks, timeout=LONG)
    check_passed(result.out)
