"""The Makefile and the tools in dev: what they say and what they refuse. compare_loss.py has its own file."""

import os
import re
import sys

import pytest

from conftest import LONG, TOP, own_lines, run, slow
import demo

TARGETS = "help train_mlp demo test test-all test-san units cuda-check bench llmc clean".split()


def test_make_help():
    out = run(["make", "help"]).out
    assert all(f"\n  make {target} " in out for target in TARGETS)
    assert "device: " in out


def test_make_without_mpi_and_with_a_wrong_device():
    command = "make -n -B train_mlp DEVICE=cpu".split()
    assert "-DZERO_USE_MPI" in run(command).out
    assert "-DZERO_USE_MPI" not in run([*command, "NO_MPI=1"]).out
    wrong = run(["make", "help", "DEVICE=tpu"], check=False)
    assert wrong.code != 0 and "DEVICE=tpu: cuda or cpu" in wrong.err


@pytest.mark.parametrize("what", ["test", "demo"])
def test_deps_does_nothing_the_second_time(what):
    """It says a line for each thing that it does."""
    first, second = [run(["dev/deps.sh", what], timeout=LONG) for _ in range(2)]
    assert not own_lines(second.out + second.err, "deps: "), (first, second)


def test_deps_refuses_other_words():
    result = run(["dev/deps.sh", "everything"], check=False)
    assert result.code == 2 and own_lines(result.err, "usage: dev/deps.sh [test|demo|cuda"), result.err


def test_mpirun_is_quiet():
    """As root, with more ranks than cores, without a network. hwloc may have something to say of the machine."""
    result = run(["sh", "-c", "echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE"], ranks=3)
    assert sorted(own_lines(result.out, "rank")) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert not re.search(r"mpirun|Open MPI|ORTE|PRTE|PMIx|^-{20}", result.err, re.M), result.err


def test_launch_as_a_command():
    command = [sys.executable, "dev/launch.py", 2, "sh", "-c", 'echo "rank $OMPI_COMM_WORLD_RANK $1"', "sh", "a b"]
    assert sorted(own_lines(run(command).out, "rank")) == ["rank 0 a b", "rank 1 a b"]
    assert run([sys.executable, "dev/launch.py", 2, "false"], check=False).code != 0


# ---- whose environment it is


ODD = {"GTEST_FILTER": "None", "CUDA_CPU_FAIL": "cudaMalloc:1", "CUDA_CPU_STREAMS": "lazy", "CUDA_CPU_TIMEOUT": "0",
       "SLURM_JOB_ID": "7/x", "LLMC_ZERO_JOB": "a.b", "OMPI_COMM_WORLD_SIZE": "9", "PMI_SIZE": "9", "NCCL_HOSTID": "x",
       "MAKEFLAGS": "-j4 --no-such-flag", "BASH_ENV": "/dev/full", "CDPATH": "/", "GIT_DIR": "/nowhere", "COLUMNS": "20",
       "NO_COLOR": "1", "LANG": "de_DE.UTF-8", "LC_ALL": "tlh", "HOME": "/proc/nowhere", "OMP_NUM_THREADS": "7",
       "PYTHONPATH": "/nowhere", "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": None}
SAMPLE = ["test_tools.py::test_make_without_mpi_and_with_a_wrong_device", "test_tools.py::test_mpirun_is_quiet",
          "test_units.py::test_unit[test_schedule-None]", "test_units.py::test_unit[test_cpu_streams-None]",
          "test_cli.py::test_ranks_that_meet_in_a_folder_train_the_same", "test_cli.py::test_bad_input_is_one_line[-b]",
          "test_llmc_patch.py::test_as_a_program", "test_llmc_patch.py::test_byte_code",
          "test_llmc_patch.py::test_modes_of_files_stay", "test_timeline.py::test_picture"]


def test_the_callers_environment_decides_nothing(tmp_path):
    """Some tests of all kinds in an odd one: variables that our programs know, that other programs know, a folder for
    temporary files with a space in its name, files that only their owner may read."""
    (tmp_path / "a space").mkdir()
    odd = {**ODD, "TMPDIR": tmp_path / "a space", **{name: None for name in os.environ if name.startswith("PYTEST_")}}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "nested"]
    command = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command, *(f"test/{name}" for name in SAMPLE)]
    result = run(command, env=odd, timeout=LONG)
    assert re.search(rf"^{len(SAMPLE) + 1} passed", result.out, re.M), result.out     # test_picture: of two traces


def test_make_hands_on_no_modules_and_folders_of_others(tmp_path):
    (tmp_path / "Makefile").write_text(f"include {TOP}/Makefile\nshow:\n\t@env\n")
    names = "PYTHONPATH PYTHONHOME PYTHONOPTIMIZE CDPATH BASH_ENV".split()
    env = {**dict.fromkeys(names, "/nowhere"), "OTHER": "x"}
    out = "\n" + run(["make", "-s", "-f", tmp_path / "Makefile", "show"], env=env).out
    assert "\nOTHER=x\n" in out and not any(f"\n{name}=" in out for name in names)


def test_scripts_that_calculate_write_numbers_with_a_point():
    """Where a comma is written, awk takes 1.5 for 1, and printf refuses it."""
    for script in [*TOP.glob("dev/*.sh"), *TOP.glob("dev/*/*.sh")]:
        text = script.read_text()
        if re.search(r"\bawk\b|printf[^\n]*%[0-9.]*[efg]", text):
            assert re.search("^export LC_ALL=C\\b", text, re.M), script


# ---- dev/ptx_check.py


def ptx(change=lambda name, body: body, skip=None):
    """PTX with the update and sum kernels, each as it should be, after change(name, body)."""
    text = ".version 9.0\n"
    for algorithm in range(3):
        for rounding in range(3):
            if (algorithm, rounding) == skip:
                continue
            name = f"zero_update_kernelIL13ZeroAlgorithm{algorithm}EL12ZeroRounding{rounding}EfEv10ZeroUpdate"
            body = ("ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n" * 4 +
                    "st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};\n" * 3 +
                    "ld.global.v2.u32 {%r1, %r2}, [%rd1];\n" * 2 + "st.global.v2.u32 [%rd1], {%r1, %r2};\n" +
                    "sqrt.rn.ftz.f32 %f1, %f2;\ndiv.rn.ftz.f32 %f1, %f2, %f3;\n")
            grads = ["f"] if rounding == 0 else ["8ZeroBf16f", "8ZeroBf16S0_"]
            for types in grads:
                entry = name.replace("EfEv10", f"E{types}Ev10")
                text += f".visible .entry _Z18{entry}(\n)\n{{\n{change((algorithm, rounding), body)}}}\n"
    for grad in ("f", "8ZeroBf16"):
        body = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n" * 5 + \
               "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\n" + \
               "st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};\n" * 2
        text += f".visible .entry _Z15zero_sum_kernelI{grad}Ev7ZeroSumi(\n)\n{{\n{change('sum', body)}}}\n"
        text += f".visible .entry _Z24zero_norm_squares_kernelI{grad}EvPK9(\n)\n{{\n{change('norm', body)}}}\n"
    return text


@pytest.mark.parametrize("old, new, message", [
    ("", "", None),
    ("sqrt.rn.ftz", "sqrt.approx.ftz", "sqrt.approx.ftz.f32"),
    ("div.rn.ftz", "div.approx", "div.approx.f32"),
    ("div.rn.ftz", "div.full.ftz", "div.full.ftz.f32"),
    ("st.global.v4.f32", "st.global.f32", "0 16-byte stores"),
    ("ld.global.v4.f32", "ld.global.v2.f32", "0 16-byte loads"),
    ("st.global.v2.u32", "st.global.u32", "0 8-byte stores")])
def test_ptx_check(tmp_path, old, new, message):
    (tmp_path / "k.ptx").write_text(
        ptx(lambda name, body: body.replace(old, new) if old and name in ((0, 0), (0, 1)) else body))
    result = run([sys.executable, "dev/ptx_check.py", tmp_path / "k.ptx"], check=False)
    assert result.code == (1 if message else 0), result.out
    assert ("WRONG" in result.out) == bool(message) and (message or "") in result.out


def test_ptx_check_misses_a_kernel(tmp_path):
    (tmp_path / "k.ptx").write_text(ptx(skip=(1, 2)))
    result = run([sys.executable, "dev/ptx_check.py", tmp_path / "k.ptx"], check=False)
    assert result.code == 1 and "13 instances of the update kernel, 4 of norm and sum, 15 and 4 expected" in result.out


# ---- dev/demo.py


def summaries(changed=1, **changes):
    off = {"stage": 0, "params_hash": "00c0ffee", "params_sum": -3453.5, "loss": 0.98, "norm": 0.1,
           "peak_mb": [320.2, 640.4, 960.6, 1285.1], "optimizer_state_mb": 640.32}
    runs = [off] + [{**off, "stage": stage, "peak_mb": [*off["peak_mb"][:3], peak], "optimizer_state_mb": 320.16}
                    for stage, peak in enumerate((964.9, 838.9, 710.9), 1)]
    runs[changed].update(changes)
    return runs


def test_demo_table():
    table = demo.table_of(2, summaries())
    text = "\n".join(str(cell) for column in table.columns for cell in column.cells)
    for cell in "1361 1697 1553 2057 1365 1679 965 1285 839 711 -3453.6123".split() + ["0.5000 of off"]:
        assert cell in text


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("change", [
    {"params_hash": "00c0ffef"}, {"params_sum": -3453.5000001}, {"loss": 0.9800001}, {"norm": 0.2},
    {"optimizer_state_mb": 321}, {"optimizer_state_mb": 320}, {"peak_mb": [320, 640, 960, 971]}])
def test_demo_checks(change, stage):
    assert all(holds for _, holds in demo.check(2, summaries()))
    assert sum(not holds for _, holds in demo.check(2, summaries(stage, **change))) == 1


@slow
def test_demo():
    run(["make", "demo"], timeout=LONG)
    assert (TOP / "build/demo/loss.png").stat().st_size > 10000
