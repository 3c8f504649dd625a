"""dev/compare_loss.py: what it reads, what it says, its exit codes."""

from collections import namedtuple

import pytest

import conftest  # noqa: F401 (puts dev/ on the path)
import compare_loss

Result = namedtuple("Result", "code out err")
OURS = "s:0 trl:0.989549041 lr:0.01 norm:1.25\ns:1 trl:0.987078726 lr:0.01 norm:1.5\n"
LLMC = ("s:0 tel:10.9928\ns:0 trl:11.0083 lr:0.000003 norm:15.3457\ns:250 eval:0.2985\n"
        "s:1 trl:10.9 lr:0.1 norm:3.1\n")


@pytest.fixture
def tool(capsys):
    """Calls the tool's main with command line arguments."""
    def call(*arguments):
        try:
            code = compare_loss.main([str(argument) for argument in arguments])
        except SystemExit as end:   # from argparse
            code = end.code
        return Result(code, *capsys.readouterr())
    return call


@pytest.fixture
def compare(tool, tmp_path):
    """Compares two logs given as text."""
    def call(a, b, *options):
        for name, text in (("a.log", a), ("b.log", b)):
            (tmp_path / name).write_text(text)
        return tool(tmp_path / "a.log", tmp_path / "b.log", *options)
    return call


def test_equal_logs(compare):
    result = compare(OURS, OURS)
    assert result.code == 0
    assert "loss             2 steps compared, all equal" in result.out
    assert "norm             2 steps compared, all equal" in result.out


def test_log_of_llmc(compare):
    result = compare(LLMC, LLMC)
    assert result.code == 0
    for title in ("loss", "norm", "validation loss", "eval"):
        assert f"\n{title:16} " in "\n" + result.out


@pytest.mark.parametrize("tolerance, code", [("0", 1), ("9e-7", 1), ("1.1e-6", 0)])
def test_tolerance_is_relative(compare, tolerance, code):
    result = compare("s:0 trl:1000\ns:7 trl:2000\n", "s:0 trl:1000\ns:7 trl:2000.002\n", "--tol", tolerance)
    assert result.code == code
    assert "at step 7: 2000.0 and 2000.002" in result.out


def test_last_digit_counts(compare):
    assert compare("s:0 trl:0.123456789\n", "s:0 trl:0.123456788\n").code == 1


def test_norm_alone_differs(compare):
    result = compare(OURS, OURS.replace("norm:1.5", "norm:1.6"), "--tol", "1e-3")
    assert result.code == 1
    assert "1 beyond 0.001, largest difference 0.0625 at step 1" in result.out


def test_last_line_of_a_step_wins(compare):
    assert compare("s:0 trl:9 norm:1.25\n" + OURS, OURS).code == 0
    assert compare(OURS + "s:1 trl:3\n", OURS).code == 1


def test_order_of_lines_does_not_matter(compare):
    assert compare("".join(reversed(OURS.splitlines(True))), OURS).code == 0


def test_different_steps(compare):
    result = compare(OURS, OURS + "s:2 trl:0.5\n", "--tol", "1")
    assert result.code == 1
    assert "missing in a.log: step 2" in result.out


def test_key_in_one_log_only_is_named(compare):
    result = compare("s:0 trl:1 norm:2\n", "s:0 trl:1\n")
    assert result.code == 0
    assert "only in a.log: not compared" in result.out


@pytest.mark.parametrize("a, b, code", [
    ("nan", "nan", 0), ("-nan", "nan", 0), ("inf", "inf", 0), ("nan", "1", 1), ("1", "nan", 1),
    ("inf", "-inf", 1), ("inf", "1e30", 1)])
@pytest.mark.parametrize("tolerance", ["0", "1000"])
def test_not_finite(compare, a, b, code, tolerance):
    assert compare(f"s:0 trl:1\ns:1 trl:{a}\n", f"s:0 trl:1\ns:1 trl:{b}\n", "--tol", tolerance).code == code


def test_zero(compare):
    assert compare("s:0 trl:0\n", "s:0 trl:-0\n").code == 0
    assert compare("s:0 trl:0\n", "s:0 trl:1e-30\n").code == 1


@pytest.mark.parametrize("text, message", [
    ("", "no training loss"), ("\n\n", "no training loss"), ("s:0 tel:1\n", "no training loss"),
    ("hello\n", "a.log:1: not a line of a log"), (OURS + "s:x trl:1\n", "a.log:3"), ("s:0 trl:\n", "a.log:1"),
    ("s:0 trl:1,5\n", "not a number"), ("s:0\n", "a.log:1"), ("s:-1 trl:1\n", "a.log:1"),
    ("\0\xff", "a.log:1")])
def test_unreadable(compare, text, message):
    result = compare(text, OURS)
    assert result.code == 2
    assert message in result.err and result.err.count("\n") == 1


def test_no_common_step(compare):
    result = compare("s:0 trl:1\n", "s:1 trl:1\n")
    assert result.code == 2
    assert "no step in common" in result.err


def test_missing_file_and_bad_tolerance(tmp_path, compare, tool):
    result = tool(tmp_path / "x.log", tmp_path / "y.log")
    assert result.code == 2 and "x.log: No such file" in result.err
    for value in ("x", "-1", "nan", "inf"):
        assert compare(OURS, OURS, f"--tol={value}").code == 2


def test_folders(tmp_path, tool):
    for name in ("off", "sharded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.log").write_text(OURS)
    assert tool(tmp_path / "off", tmp_path / "sharded").code == 0


@pytest.mark.parametrize("other", [OURS, OURS.replace("0.987078726", "nan"), "s:1 trl:0.98\ns:2 trl:1\n"])
def test_png(compare, tmp_path, other):
    result = compare(OURS, other, "--tol", "1", "--png", tmp_path / "new/loss.png")
    assert result.code == (0 if other == OURS else 1)
    assert (tmp_path / "new/loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_names_and_title(compare, tmp_path):
    names = ["--names", "off (-z 0)", "on (-z 1)", "--title", "Two runs", "--png", tmp_path / "loss.png"]
    result = compare(OURS, OURS + "s:9 trl:1\n", *names)
    assert result.code == 1 and "missing in off (-z 0): step 9" in result.out
    assert (tmp_path / "loss.png").stat().st_size > 10000
