"""Runs the unit programs that the Makefile builds from test/test_*.cu; those that exchange data on 1 to 4 ranks."""

import pytest
from conftest import TOP, run

ON_RANKS = {"test_optimizer"}
PROGRAMS = sorted(path.stem for path in (TOP / "test").glob("test_*.cu"))
PROGRAMS += [name + "_fast" for name in ("test_adamw", "test_grad_norm") if name in PROGRAMS]
CASES = [(name, ranks) for name in PROGRAMS for ranks in ((1, 2, 3, 4) if name in ON_RANKS else (None,))]


@pytest.mark.parametrize("name,ranks", CASES)
def test_unit(name, ranks):
    result = run([str(TOP / "build/test" / name)], ranks=ranks, timeout=300)
    assert "[  PASSED  ]" in result.out and "[  FAILED  ]" not in result.out
