"""The patched llm.c, for real: needs LLMC_DIR, a checkout of llm.c (or of a fork that the patch knows).

A copy of it is patched, built with dev/cpu/nvcc in FP32 and BF16, and trained on a tiny model under mpirun, with
different data on each rank and the norm clipped. What it must show: sharding changes nothing but the memory.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import test_cpu_rewrite
from conftest import LONG, TOP, end, run, slow, start

sys.path.insert(0, str(TOP / "dev/llmc"))
import launch
import make_files

LLMC = os.environ.get("LLMC_DIR")
pytestmark = pytest.mark.skipif(not LLMC, reason="LLMC_DIR names no checkout of llm.c")
PATCH = str(TOP / "dev/llmc/patch.py")
STEPS = 20

Run = namedtuple("Run", "log model out steps")   # lines, bytes, what was printed, {step: (loss, norm)}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm c")   # a path with a space
    test_cpu_rewrite.tiny_files(folder)
    return folder


@pytest.fixture(scope="module")
def build(work):
    """build(kind, precision): the program; kind is patched, mended, plain, or patched-window (see below)."""
    def copy(kind):
        folder = work / f"source {kind}"
        if not folder.exists():
            shutil.copytree(LLMC, folder, ignore=shutil.ignore_patterns(".git", "*.bin", "build"))
            if kind == "patched-window":   # the outlier detector waits for 128 steps: for 4
                header = folder / "llmc/outlier_detector.h"
                header.write_text(re.sub(r"(OUTLIER_DETECTOR_WINDOW_SIZE) 128", r"\1 4", header.read_text()))
            if kind != "plain":
                run([PATCH, str(folder), *(["--mends-only"] if kind == "mended" else [])])
        return folder

    def make(kind, precision="FP32", source="train_gpt2.cu", multi_gpu=True, mpi=True):
        program = work / f"{kind} {precision} {Path(source).stem} {multi_gpu} {mpi}"
        if not program.exists():
            words = [f"-DENABLE_{precision}", "-lcublas", "-lcublasLt"]
            if multi_gpu:
                words += ["-DMULTI_GPU", "-lnccl"]
            if multi_gpu and mpi:
                words += ["-DUSE_MPI", *flags_of_mpi("compile"), *flags_of_mpi("link")]
            command = [test_cpu_rewrite.NVCC, "-O3", "-std=c++17", "--use_fast_math", source, *words]
            done = subprocess.run([*command, "-o", program], cwd=copy(kind), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
        return program
    return make


def flags_of_mpi(what):
    return subprocess.check_output([launch.mpi_tool("mpicc"), f"-showme:{what}"], text=True).split()


def words_of(work, precision, folder, steps, flags):
    tokens = str(work / "tokens.bin")
    return ["-i", tokens, "-j", tokens, "-e", str(work / f"{precision}.bin"), "-b", "2", "-t", "64",
            "-x", str(steps), "-v", str(steps), "-m", "1", "-s", "0", "-l", "0.001", "-c", "0.1", "-o", str(folder),
            "-n", str(steps), *map(str, flags)]


@pytest.fixture(scope="module")
def train(work, build):
    """train(kind, precision, ranks, flag, ...): a Run."""
    numbers = iter(range(10 ** 6))

    def start(kind, precision, ranks, *flags, steps=STEPS, env=None, check=True, folder=None):
        folder = folder or work / f"run{next(numbers)}"
        folder.mkdir(exist_ok=True)
        # plain llm.c reduces 4 floats where it has allocated one
        env = {**({"CUDA_CPU_ROUND": "512"} if kind == "plain" else {}), **(env or {})}
        result = run([str(build(kind, precision)), *words_of(work, precision, folder, steps, flags)],
                     ranks=ranks, cwd=work, env=env, timeout=LONG, check=check)
        if not check:
            return result
        log = (folder / "main.log").read_text().splitlines()
        found = re.findall(r"^s:(\d+) trl:(\S+) lr:\S+ norm:(\S+)$", "\n".join(log), re.M)
        return Run(log, (folder / f"model_{steps:08}.bin").read_bytes(), result.out,
                   {int(s): (float(loss), float(norm)) for s, loss, norm in found})
    return start


def same(a, b):
    assert len(a.steps) > 0 and a.log == b.log
    assert hashlib.sha256(a.model).digest() == hashlib.sha256(b.model).digest()


def state_bytes(out):
    """Of one rank, as the trainer prints it."""
    return int(re.search(r"^llmc_zero: stage .* m \+ v(?: \+ masters)? (\d+) \(", out, re.M)[1])


# ---- on = off

@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_sharding_changes_nothing(train, precision, ranks, micro_steps):
    """289,664 parameters, which 3 does not divide: there plain llm.c turns sharding off."""
    batch = ["-d", 2 * 64 * ranks * micro_steps]
    off = train("patched", precision, ranks, "-z", 0, *batch)
    on = train("patched", precision, ranks, "-z", 1, *batch)
    same(off, on)
    assert sorted(off.steps) == list(range(STEPS))
    assert max(norm for _, norm in off.steps.values()) > 1.5   # clipped
    assert off.steps[STEPS - 1][0] < off.steps[0][0] - 0.5     # learns
    for one in (off, on):   # the ranks compare their parameters at the end
        assert f"on each of {ranks} ranks" in one.out
    per_rank, whole = state_bytes(on.out), state_bytes(off.out)
    assert whole / ranks <= per_rank <= whole / ranks + 4096 * ranks


@pytest.mark.parametrize("flags", [["-K", 0], ["-K", 0.1], ["-O", 0], ["-w", 0], ["-r", 2, "-ge", 2], ["-t", 32]],
                         ids=lambda flags: " ".join(map(str, flags)))
def test_other_settings(train, flags):
    """-t 32: shorter than the position table."""
    for precision in ("FP32", "BF16"):
        same(train("patched", precision, 2, "-z", 0, *flags, steps=6),
             train("patched", precision, 2, "-z", 1, *flags, steps=6))


def test_overlap_and_allreduce(train):
    """Two ranks: every order of adding is the same."""
    one = train("patched", "FP32", 2, "-z", 1, steps=6)
    same(one, train("patched", "FP32", 2, "-z", 1, "-O", 0, steps=6))
    same(one, train("patched", "FP32", 2, "-z", 0, "-R", "allreduce", steps=6))
    same(one, train("patched", "FP32", 2, "-z", 1, "-H", 1, steps=6))


# ---- gradients and parameters sharded

ORDERED = ["-R", "ordered", "-A", "micro"]


def tensors_of(checkpoint):
    """The bytes of a checkpoint behind its header, which names the stage."""
    data = checkpoint.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little"):]


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize("flags", ["-d 512 -n 2 -s 2 -g 8", "-w 0 -K 0.1", "-r 0 -O 0",
                                   "-r 2 -ge 2 -b 1 -t 32 -d 128"])
def test_all_stages_are_the_same_bits(work, train, precision, flags):
    """Log, model, samples, and the models and checkpoints in between. -d: two micro-steps; -r: what is recomputed;
    -ge: gelu within the matrix product."""
    runs = []
    for stage in range(4):
        folder = work / f"stage {stage} {precision} {flags}"
        one = train("patched", precision, 2, "-z", stage, *ORDERED, *flags.split(), steps=4, folder=folder)
        assert f"llmc_zero: stage {stage}, " in one.out and "on each of 2 ranks" in one.out
        sampled = re.findall(r"^generating:\n---\n([\d ]*)\n---$", one.out, re.M)
        assert len(sampled) == (2 if "-s" in flags else 0) and all(len(words.split()) == 7 for words in sampled)
        read = {path.name: tensors_of(path) if path.suffix == ".safetensors" else path.read_bytes()
                for path in folder.iterdir()}
        files = {name: hashlib.sha256(data).digest() for name, data in read.items()}
        assert len(files) == 1 + 3 * (2 if "-n" in flags else 1)   # main.log; a model, a checkpoint and DONE each
        runs.append((one.log, sampled, files))
    assert len(runs[0][0]) > 4 and runs[0] == runs[1] == runs[2] == runs[3]


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_stages_2_and_3_under_nccls_own_sums(train, precision):
    """Three ranks, where a ring's order counts: the same buckets, so the same sums."""
    two, three = [train("patched", precision, 3, "-z", stage, "-R", "nccl", "-d", 768, steps=4) for stage in (2, 3)]
    same(two, three)
    assert two.steps[3][0] < two.steps[0][0]


def held(out):
    """Bytes of parameters and of gradients on each rank."""
    found = re.search(r"^llmc_zero: stage .* parameters (\d+), gradients (\d+),", out, re.M)
    return int(found[1]), int(found[2])


def test_stages_hold_less(work, train):
    """Of 8 layers: two and the embeddings stay whole beside a rank's half."""
    model, layers, elements = work / "deep.bin", 8, 12 * 32 * 32 + 13 * 32
    make_files.write_model(model, "FP32", (64, 8192, layers, 2, 32))
    off, one, two, three = [held(train("patched", "FP32", 2, "-z", stage, "-e", model, steps=1).out)
                            for stage in range(4)]
    embeddings = 4 * (8192 + 64) * 32
    whole = embeddings + 4 * layers * elements
    assert off == one and one[0] >= whole and two[0] == one[0]
    for bytes_, units in ((two[1], 3), (three[1], 3), (three[0], 2)):
        assert whole / 2 <= bytes_ <= whole / 2 + embeddings + units * 4 * elements + 8192


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_orders_of_streams_in_stages_2_and_3(train, stage, precision):
    eager, *others = [train("patched", precision, 2, "-z", stage, "-d", 512, steps=3, env={"CUDA_CPU_STREAMS": mode})
                      for mode in ("eager", "lazy", "rush:2", "threads")]
    for other in others:
        same(eager, other)


@pytest.mark.parametrize("before, after", [(3, 1), (1, 3), (3, 3), (2, 3)])
def test_resume_in_another_stage(work, train, before, after):
    """To the bit, the rest of the log and the checkpoint too; in BF16 with masters."""
    folder = work / f"resume {before} {after}"
    flags = [*ORDERED, "-n", 2, "-d", 512]
    straight = train("patched", "BF16", 2, "-z", before, *flags, steps=4, folder=folder)
    checkpoint = tensors_of(folder / "step_00000004.safetensors")
    back_to(folder, 2)
    resumed = train("patched", "BF16", 2, "-z", after, *flags, "-y", 1, steps=4, folder=folder)
    assert "resumed from step 2" in resumed.out
    same(straight, resumed)
    assert tensors_of(folder / "step_00000004.safetensors") == checkpoint


# ---- patched against unpatched

def test_as_unpatched_on_one_rank(train):
    """Both with the mends. Not to the bit: llm.c takes 1 - beta in fp32, and divides where we multiply."""
    ours, theirs = train("patched", "FP32", 1), train("mended", "FP32", 1)
    assert ours.steps[0][0] == theirs.steps[0][0]
    for step, (loss, norm) in theirs.steps.items():
        assert abs(ours.steps[step][0] - loss) <= 1e-5 * loss
        assert abs(ours.steps[step][1] - norm) <= 1e-5 * norm


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize("flags", [["-z", 0], ["-z", 1]], ids=str)
def test_model_files_are_llm_cs(work, train, precision, flags):
    """Read and written with lr 0: the same bytes, whoever wrote them."""
    still = ["-l", 0, "-c", 0, "-w", 1]
    given = (work / f"{precision}.bin").read_bytes()
    ours = train("patched", precision, 2, *still, *flags, steps=1).model
    assert ours == given
    changed = train("patched", precision, 2, *flags, steps=3).model
    assert changed != given
    (work / "changed.bin").write_bytes(changed)
    assert train("mended", precision, 1, *still, "-e", work / "changed.bin", steps=1).model == changed


def test_two_ranks_as_unpatched_without_sharding(train):
    ours, theirs = train("patched", "FP32", 2, "-z", 1), train("mended", "FP32", 2, "-z", 0)
    for step, (loss, _) in theirs.steps.items():
        assert abs(ours.steps[step][0] - loss) <= 1e-5 * loss


# ---- streams

MODES = [{"CUDA_CPU_STREAMS": mode} for mode in ("lazy", "rush:0", "rush:1", "rush:2", "rush:3", "rush:4")] + [
    {"CUDA_CPU_SCHED": "rev"}, {"CUDA_CPU_SCHED": "rand:7", "CUDA_CPU_STREAMS": "rush:1"}]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_every_order_of_streams_and_warps(train, stage, precision):
    eager = train("patched", precision, 2, "-z", stage, steps=4)
    for env in MODES:
        same(eager, train("patched", precision, 2, "-z", stage, steps=4, env=env))


def test_plain_llm_c_depends_on_the_order_of_streams(train):
    """Why gather-order is mended: the same run, two results."""
    losses = {mode: train("plain", "FP32", 2, "-z", 1, steps=4, env={"CUDA_CPU_STREAMS": mode}).log
              for mode in ("eager", "rush:1")}
    assert losses["eager"] != losses["rush:1"]
    mended = [train("mended", "FP32", 2, "-z", 1, steps=4, env={"CUDA_CPU_STREAMS": mode}).log
              for mode in ("eager", "rush:1")]
    assert mended[0] == mended[1]


def test_plain_llm_c_races_in_attention_backward(train):
    """Why block-reduce is mended."""
    orders = [train("plain", "FP32", 1, steps=2, env={"CUDA_CPU_SCHED": order}).model for order in ("fwd", "rev")]
    assert orders[0] != orders[1]


# ---- what else llm.c does

def back_to(folder, step):
    """As if the run had ended at a step."""
    for path in folder.iterdir():
        number = re.search(r"_(\d{8})", path.name)
        if number and int(number[1]) > step:
            path.unlink()


@pytest.mark.parametrize("precision, masters", [("FP32", 1), ("BF16", 1), ("BF16", 0)])
@pytest.mark.parametrize("stage", [0, 1])
def test_resume(work, train, precision, masters, stage):
    """To the bit, log and all of the checkpoint too; another stage and bucket size go on as well."""
    folder = work / f"resume {precision} {masters} {stage}"
    flags = ["-z", stage, "-w", masters, "-n", 2]
    straight = train("patched", precision, 3, *flags, steps=4, folder=folder)
    checkpoint = (folder / "step_00000004.safetensors").read_bytes()
    back_to(folder, 2)
    resumed = train("patched", precision, 3, *flags, "-y", 1, steps=4, folder=folder)
    same(straight, resumed)
    assert (folder / "step_00000004.safetensors").read_bytes() == checkpoint
    back_to(folder, 2)
    other = train("patched", precision, 3, "-z", 1 - stage, "-K", 0.5, "-w", masters, "-n", 2, "-y", 1, steps=4,
                  folder=folder)
    assert "resumed from step 2" in other.out and not list(folder.glob("state_*"))
    tolerance = 1e-5 if precision == "FP32" else 1e-2
    assert abs(other.steps[3][0] - straight.steps[3][0]) <= tolerance * straight.steps[3][0]


def test_resume_on_other_ranks(work, train):
    """4 -> 2 -> 1 ranks with 512 tokens a step. -a 1 takes the same ones in each step, so that the losses are those of
    one run; without it the data is shuffled, and that is said."""
    for flags in (["-a", 1], []):
        folder = work / f"ranks {flags}"
        flags = ["-z", 1, "-n", 2, "-d", 512, "-v", 6, *flags]
        straight = train("patched", "FP32", 4, *flags, steps=6, folder=folder)
        for ranks, step in ((2, 2), (1, 4)):
            back_to(folder, step)
            last = train("patched", "FP32", ranks, *flags, "-y", 1, steps=6, folder=folder)
            said = re.search(rf"resumed from step {step} in .*", last.out)[0]
            assert f"written by {2 * ranks} ranks" in said and ("drawn anew" in said) == ("-a" not in flags)
        assert sorted(last.steps) == list(range(6))
        for step, (loss, _) in straight.steps.items() if "-a" in flags else ():
            assert abs(last.steps[step][0] - loss) <= 1e-5 * loss


def test_equal_runs_leave_the_same_bytes(work, train):
    """Data is shuffled, and the generator's state saved with a field that llm.c never sets."""
    files = []
    for name in ("equal a", "equal b"):
        train("patched", "FP32", 2, "-z", 1, "-n", 2, steps=4, folder=work / name)
        files.append([(work / name / f"step_{step:08}.safetensors").read_bytes() for step in (2, 4)])
    assert files[0] == files[1]


def test_resume_in_the_other_precision(work, train):
    folder = work / "precision"
    train("patched", "FP32", 2, "-n", 2, "-z", 1, steps=2, folder=folder)
    middle = train("patched", "BF16", 2, "-n", 2, "-y", 1, steps=4, folder=folder)
    assert "saved in fp32, loaded into bf16 with fp32 masters" in middle.out
    end = train("patched", "FP32", 2, "-n", 2, "-y", 1, "-z", 1, steps=6, folder=folder)
    assert "saved in bf16 with fp32 masters, loaded into fp32" in end.out and sorted(end.steps) == list(range(6))
    assert end.steps[5][0] < end.steps[0][0]


def test_resume_among_files_of_different_lengths(work, train):
    """There llm.c's own resume ends with an assertion: it compares with the file that a new run begins with."""
    folder, tokens = work / "two files", (work / "tokens.bin").read_bytes()
    folder.mkdir()
    for name, count in (("a", 257 + 256), ("b", 257 + 3 * 256), ("c", 257 + 6 * 256)):
        header = data_header(tokens, count)
        (folder / f"data_{name}.bin").write_bytes(header + tokens[1024:1024 + 2 * count])
    flags = ["-z", 1, "-n", 2, "-i", folder / "data_*.bin"]
    straight = train("patched", "FP32", 2, *flags, steps=14, folder=folder)
    for step in (12, 6, 2):
        back_to(folder, step)
        same(straight, train("patched", "FP32", 2, *flags, "-y", 1, steps=14, folder=folder))


def data_header(tokens, count):
    return tokens[:8] + count.to_bytes(4, "little") + tokens[12:1024]


@pytest.mark.parametrize("precision, masters", [("FP32", 1), ("BF16", 1), ("BF16", 0)])
@pytest.mark.parametrize("stage", [0, 1])
def test_state_files_of_llm_c_are_read_once(work, train, precision, masters, stage):
    """Those of llm.c with its mends, of -z 0 and 1, into both of our stages: at rate 0 the model stays as it is."""
    import numpy
    from ml_dtypes import bfloat16
    folder = work / f"old {precision} {masters} {stage}"
    flags = ["-w", masters, "-n", 2, "-v", 4]
    theirs = train("mended", precision, 2, *flags, "-z", stage, steps=4, folder=folder)
    for path in folder.glob("*00000004*"):
        path.unlink()
    for ours, bucket in ((0, 0), (1, 0.1)):
        copy = shutil.copytree(folder, work / f"{folder.name} {ours}")
        end = train("patched", precision, 2, *flags, "-z", ours, "-K", bucket, "-y", 1, steps=4, folder=copy)
        assert "the next checkpoint has the new format" in end.out and (copy / "step_00000004.safetensors").exists()
        tolerance = 1e-5 if precision == "FP32" else 2e-3
        for step in (2, 3):
            assert abs(end.steps[step][0] - theirs.steps[step][0]) <= tolerance * theirs.steps[step][0]
        still = shutil.copytree(folder, work / f"{folder.name} {ours} still")
        before = (still / "model_00000002.bin").read_bytes()
        after = train("patched", precision, 2, *flags, "-z", ours, "-l", 0, "-y", 1, steps=4, folder=still)
        if (precision, masters) != ("BF16", 1):
            assert after.model == before
            continue
        # llm.c has rounded its weights at random, ours are the nearest to the masters
        numbers = [numpy.frombuffer(model[1024:], bfloat16).astype(numpy.float32) for model in (before, after.model)]
        assert numpy.allclose(*numbers, rtol=2 ** -7, atol=1e-30)
        if stage == 0:
            whole, count = (still / "state_00000002_00000.bin").read_bytes(), len(numbers[0])
            data = (still / "step_00000004.safetensors").read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            assert data[start:start + 4 * count] == whole[1024 + 8 * count:1024 + 12 * count]


def test_outliers_are_skipped_alike(train):
    """llm.c leaves gpt2_update out; the next step begins on all ranks with what was there before."""
    off, on = [train("patched-window", "FP32", 3, "-z", stage, "-sg", 0.2, steps=16) for stage in (0, 1)]
    same(off, on)
    assert 1 <= len(re.findall("skipping update due to grad", on.out)) < 12


@pytest.mark.parametrize("flags, words", [
    (["-z", 4], "-z 4: 0 (off)"), (["-z", -1], "-z -1: 0 (off)"), (["-K", "big"], "-K big"), (["-K", -1], "-K -1"),
    (["-R", "ring"], "-R ring"), (["-A", "all"], "-A all"), (["-O", 2], "-O 2"), (["-H", "x"], "-H x"),
    (["-z", 1, "-R", "allreduce"], "allreduce works in stage 0")])
def test_bad_flags(train, flags, words):
    result = train("patched", "FP32", 2, *flags, steps=1, check=False)
    assert result.code != 0 and words in result.out + result.err


def test_its_own_test(work, build):
    """llm.c's test_gpt2.cu on a tiny model: gradients against its train_gpt2.c, and whether runs repeat."""
    folder = work / "test"
    (folder / "dev/data/tinyshakespeare").mkdir(parents=True)
    shutil.copy(work / "tokens.bin", folder / "dev/data/tinyshakespeare/tiny_shakespeare_val.bin")
    shutil.copy(work / "FP32.bin", folder / "gpt2_124M.bin")
    shutil.copy(work / "BF16.bin", folder / "gpt2_124M_bf16.bin")
    reference = str(work / "debug_state")
    subprocess.run(["gcc", "-O3", "-w", "-I", LLMC, str(TOP / "test/llmc_debug_state.c"), "-lm", "-o", reference],
                   check=True)
    run([reference, "gpt2_124M.bin", "gpt2_124M_debug_state.bin", "2", "64"], cwd=folder)
    lines = {}
    for kind in ("mended", "patched"):
        for precision in ("FP32", "BF16"):
            # exit code 1: the losses that it expects are those of the model with 124M parameters
            out = run([str(build(kind, precision, "test_gpt2.cu"))], ranks=1, cwd=folder, check=False).out
            assert len(re.findall("^TENSOR OK", out, re.M)) == 16, out
            assert "Nondeterminism" not in out
            lines[kind, precision] = re.findall(r"^loss ok at step \d: (\S+) (\S+)$", out, re.M)
            assert len(lines[kind, precision]) == 10 and all(a == b for a, b in lines[kind, precision])
    for (ours, _), (theirs, _) in zip(lines["patched", "FP32"], lines["mended", "FP32"]):
        assert abs(float(ours) - float(theirs)) <= 2.1e-6   # of 9: the update rounds differently


def test_without_nccl_and_without_mpi(work, train, build):
    """NO_MULTI_GPU=1 and NO_USE_MPI=1 builds; the latter find each other through a folder (-pi fs)."""
    expected = train("patched", "FP32", 1, steps=3)
    folder = work / "alone"
    folder.mkdir()
    run([str(build("patched", multi_gpu=False)), *words_of(work, "FP32", folder, 3, [])], cwd=work)
    assert (folder / "model_00000003.bin").read_bytes() == expected.model

    expected = train("patched", "FP32", 2, "-z", 1, steps=3)
    folder = work / "by folder"
    folder.mkdir()
    words = words_of(work, "FP32", folder, 3, ["-z", 1, "-pi", "fs", "-pf", folder, "-pn", 2])
    ranks = [start([build("patched", mpi=False), *words, "-pr", rank], cwd=work) for rank in (0, 1)]
    for process in ranks:
        _, err = end(process)
        assert process.returncode == 0, err[-2000:]
    assert (folder / "model_00000003.bin").read_bytes() == expected.model


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_the_other_programs_build(build, precision):
    build("patched", precision, "profile_gpt2.cu", multi_gpu=False)


@slow
def test_profile_runs_one_layer_of_two(work, build):
    """profile_gpt2.cu sets num_layers to 1 after the weights were made; 24 rows of 1024 tokens."""
    import numpy
    from ml_dtypes import bfloat16
    T, V, L, C = 1024, 8192, 2, 32
    header = numpy.zeros(256, numpy.int32)
    header[:8] = 20240326, 5, T, V, L, 2, C, V
    count = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
    values = numpy.random.default_rng(1).standard_normal(count).astype(numpy.float32) * 0.02
    folder = work / "profile"
    folder.mkdir()
    (folder / "gpt2_124M_bf16.bin").write_bytes(header.tobytes() + values.astype(bfloat16).tobytes())
    run([str(build("patched", "BF16", "profile_gpt2.cu", multi_gpu=False))], cwd=folder, timeout=LONG)
