"""The Makefile and the tools in dev: what they say and what they refuse. compare_loss.py has its own file."""

import os
import sys
import time

import pytest

from conftest import TOP, run, slow
import demo
import launch

TARGETS = "help train_mlp demo test test-all units cuda-check bench llmc clean".split()


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
    results = [run(["dev/deps.sh", what], timeout=300) for _ in range(4)]
    assert all(result.out == result.err == "" for result in results[1:])
    assert min(result.seconds for result in results[1:]) < 0.3


def test_deps_refuses_other_words():
    result = run(["dev/deps.sh", "everything"], check=False)
    assert result.code == 2 and result.err == "usage: dev/deps.sh [test|demo|cuda|lint]\n"


def test_mpirun_is_quiet():
    result = run(["sh", "-c", "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE"], ranks=3)
    assert sorted(result.out.split("\n")) == ["", "0 of 3", "1 of 3", "2 of 3"]
    assert result.err == ""


def test_launch_as_a_command():
    command = [sys.executable, "dev/launch.py", 2, "sh", "-c", 'echo "$OMPI_COMM_WORLD_RANK $1"', "sh", "a b"]
    assert sorted(run(command).out.split("\n")) == ["", "0 a b", "1 a b"]
    assert run([sys.executable, "dev/launch.py", 2, "false"], check=False).code != 0


# ---- dev/gpu_check.sh


@slow
@pytest.mark.skipif(os.environ.get("DEVICE") == "cuda", reason="would replace the build for the GPU")
def test_gpu_check_dry_run():
    start = time.monotonic()
    out = run(["dev/gpu_check.sh", "--dry-run"], timeout=170, env={"BUDGET": 150}).out
    print(out, time.monotonic() - start)
    table = (TOP / "build/gpu_check/table.txt").read_text()
    assert table in out and "FAILED" not in table
    for name in ("recipe", "buckets", "bf16-masters", "bf16-stochastic"):
        assert f"\n{name} " in table
    recipes = [line for line in table.split("\n") if line.startswith("recipe ")]
    assert [line.split()[1] for line in recipes] == ["1", "2", "4"]
    assert all(line.endswith("hash on = off") for line in recipes), recipes
    stages = [line for line in table.split("\n") if line.startswith("stages ")]
    assert [line.split()[1] for line in stages] == ["2", "4"] and all(line.endswith("one hash") for line in stages), stages
    assert "\nstage 3 " in table and (TOP / "build/gpu_check/timeline.2.1.json").stat().st_size > 1000
    for kernel in ("update AdamW fp32", "update AdamW bf16 + masters", "update AdamW bf16 stochastic"):
        assert any(line.startswith(kernel) and " of copy (" in line for line in table.split("\n"))
    llmc = [line for line in table.split("\n") if line.startswith("llm.c ")]
    assert len(llmc) == (6 if os.environ.get("LLMC_DIR") else 0)
    assert all(line.endswith(("log and model on = off", "did not fit")) for line in llmc), llmc
    for kernel in ("norm fp32", "norm bf16"):
        assert any(line.startswith(kernel) and " of read (" in line for line in table.split("\n"))
    assert "\nunit test " in table and "\ncompute-sanitizer " in table


def test_gpu_check_refuses():
    assert run(["dev/gpu_check.sh", "--fast"], check=False).code == 2
    if not launch.gpus():
        result = run(["dev/gpu_check.sh"], check=False, env={"DEVICE": "cuda"})
        assert result.code == 2 and "needs nvcc and a GPU" in result.err


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
        body = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n" * 3 + \
               "st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};\n" + \
               "ld.global.v2.u32 {%r1, %r2}, [%rd1];\n" * 2
        text += f".visible .entry _Z15zero_sum_kernelI{grad}Ev7ZeroSumi(\n)\n{{\n{change('sum', body)}}}\n"
    return text


@pytest.mark.parametrize("old, new, message", [
    ("", "", None),
    ("sqrt.rn.ftz", "sqrt.approx.ftz", "sqrt.approx.ftz.f32"),
    ("div.rn.ftz", "div.approx", "div.approx.f32"),
    ("div.rn.ftz", "div.full.ftz", "div.full.ftz.f32"),
    ("st.global.v4.f32", "st.global.f32", "0 v4.f32 stores"),
    ("ld.global.v4.f32", "ld.global.v2.f32", "0 v4.f32 loads"),
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
    assert result.code == 1 and "13 instances of the update kernel and 2 of the sum kernel, 15 and 2 expected" in result.out


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
    run(["make", "demo"], timeout=600)
    assert (TOP / "build/demo/loss.png").stat().st_size > 10000
