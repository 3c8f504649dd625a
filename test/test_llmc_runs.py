"""What dev/llmc/patch.py makes of the small trainer (test/small_llmc), run on several ranks under dev/cpu.

Four builds: the patched trainer in FP32 with MPI and in BF16 without MPI, the trainer with the mends only,
and its test_gpt2.cu, patched, without MULTI_GPU. Many command lines share one start of the ranks: each rank
runs them in turn, and they find each other through a folder (-pi fs). What has to do with errors and MPI gets
starts of its own.
"""

import re
import shlex
import shutil
import subprocess
import sys
import numpy
import pytest

from conftest import TOP, run, slow

SMALL = TOP / "test/small_llmc"
C = 23   # channels, in all runs that do not say otherwise
SIZES = [128 * C, 48 * C, *(2 * n for n in (C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C,
                                            4 * C * C, C)),
         C, C]
MODEL_HEADER, STATE_HEADER, OUR_HEADER = 32, 64, 80   # bytes; ours follows that of the trainer


def mpi(what):
    mpicc = shutil.which("mpicc") or TOP / ".venv/bin/mpicc"
    return subprocess.check_output([mpicc, f"-showme:{what}"], text=True).split()


BUILDS = {   # name: (flags of the patch, source, compiler flags)
    "fp32": ([], "train_gpt2.cu", ["-DENABLE_FP32", "-DMULTI_GPU", "-DUSE_MPI"]),
    "bf16": ([], "train_gpt2.cu", ["-DENABLE_BF16", "-DMULTI_GPU"]),
    "mended": (["--mends-only"], "train_gpt2.cu", ["-DENABLE_FP32", "-DMULTI_GPU", "-DUSE_MPI"]),
    "test": ([], "test_gpt2.cu", ["-DENABLE_FP32"]),
    # only with RUN_ALL=1
    "unpatched": (None, "train_gpt2.cu", ["-DENABLE_FP32", "-DMULTI_GPU", "-DUSE_MPI"]),
    "unpatched bf16 alone": (None, "train_gpt2.cu", ["-DENABLE_BF16"]),
    "mended bf16": (["--mends-only"], "train_gpt2.cu", ["-DENABLE_BF16", "-DMULTI_GPU", "-DUSE_MPI"]),
    "alone": ([], "train_gpt2.cu", ["-DENABLE_FP32"]),
    "mended test": (["--mends-only"], "test_gpt2.cu", ["-DENABLE_FP32"]),
    "test mpi": ([], "test_gpt2.cu", ["-DENABLE_FP32", "-DMULTI_GPU", "-DUSE_MPI"]),
    "mended test mpi": (["--mends-only"], "test_gpt2.cu", ["-DENABLE_FP32", "-DMULTI_GPU", "-DUSE_MPI"]),
    "test bf16": ([], "test_gpt2.cu", ["-DENABLE_BF16"]),
    "mended test bf16": (["--mends-only"], "test_gpt2.cu", ["-DENABLE_BF16"]),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(name of BUILDS): its path; patched and built at the first call."""
    folder = tmp_path_factory.mktemp("small llmc")

    def build(name):
        flags, source, defines = BUILDS[name]
        tree, made = folder / ("plain" if flags is None else "patched" + "".join(flags)), folder / name
        if not tree.exists():
            shutil.copytree(SMALL, tree)
            if flags is not None:
                own = [] if "--mends-only" in flags else ["--drop-own-code"]   # its macros and kernels
                subprocess.run([sys.executable, TOP / "dev/llmc/patch.py", tree, *flags, *own], check=True,
                               stdout=subprocess.PIPE)
        if not made.exists():
            words = [TOP / "dev/cpu/nvcc", "-std=c++17", "-O1", "-Xcompiler",
                     "-Wall,-Wextra,-Werror,-Wno-unused-parameter",
                     *defines, *(["-lnccl"] if "-DMULTI_GPU" in defines else [])]
            if "-DUSE_MPI" in defines:
                words += ["-DOMPI_SKIP_MPICXX", *mpi("compile"), *mpi("link")]
            result = subprocess.run([*words, "-o", made, source], cwd=tree, capture_output=True, text=True,
                                    timeout=300)
            assert result.returncode == 0, result.stderr[-4000:]
        return made
    return build


class Outcome:
    """What a command line left in its folder."""

    def __init__(self, folder):
        self.folder = folder
        self.out = (folder / "out.0").read_text()
        self.log = (folder / "main.log").read_text()
        models = sorted(folder.glob("model_*.bin"))
        self.model = models[-1].read_bytes() if models else None

    def state(self, step, rank):
        return (self.folder / f"state_{step:08}_{rank:05}.bin").read_bytes()

    def arrays(self, step, rank):
        """m, v and masters in a state file, with the patch's header; without step and place in the data."""
        return self.state(step, rank)[STATE_HEADER:-4]

    def column(self, name):
        return [float(value) for value in re.findall(rf"\b{name}:(\S+)", self.log)]

    @property
    def bits(self):
        return self.log, self.model


DEFAULT = "-b 2 -t 9 -x 4 -n 4"


def run_lines(program, ranks, folder, lines, timeout=120):
    """lines: 'NAME=VALUE ... flags'; DEFAULT comes before each, a later flag wins. Returns their Outcomes."""
    folders = [folder / f"{ranks} ranks, line {i}" for i in range(len(lines))]
    script = ["R=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-0}}"]
    for line, out in zip(lines, folders):
        out.mkdir(parents=True, exist_ok=True)
        words = line.split()
        variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
        flags = [*DEFAULT.split(), *words[len(variables):], "-o", out, "-pi", "fs", "-pf", out, "-pn", ranks]
        command = shlex.join(["env", *variables, *map(str, [program, *flags])])
        printed = shlex.quote(str(out)) + "/out.$R"
        script.append(f"{command} -pr $R > {printed} 2>&1 || {{ cat {printed}; exit 1; }}")
    (folder / f"lines{ranks}.sh").write_text("\n".join(script) + "\n")
    run(["sh", folder / f"lines{ranks}.sh"], ranks=ranks if ranks > 1 else None, timeout=timeout)
    return [Outcome(out) for out in folders]


def tokens(ranks, micro_steps):
    return f"-d {2 * 9 * ranks * micro_steps}"


def floats(data):
    return numpy.frombuffer(data, numpy.float32)


# ---------------------------------------------------------------------------- stages

SETTINGS = ["-K unit", "-K 0", "-K 0.01 -O 0", "-K unit -O 0", "-K 0.02"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stage_1_gives_the_bits_of_stage_0(program, tmp_path, ranks, precision):
    cases = [f"{setting} {tokens(ranks, 1 + i % 2)}" for i, setting in enumerate(SETTINGS)]
    if precision == "bf16":
        cases = [f"{case} -w {w}" for case in cases[:4] for w in (0, 1)]
    else:
        cases += [f"-e tiny:1x{C} -c 0", "-e tiny:3x8 -t 1 -b 1", "-t 48 -x 1 -n 1"]
    lines = [f"{case} -z {z}" for case in cases for z in (0, 1)] + [f"-K unit -O 0 {tokens(ranks, 1)}"]
    outcomes = run_lines(program(precision), ranks, tmp_path, lines)
    for i, case in enumerate(cases):
        zero, one = outcomes[2 * i:2 * i + 2]
        assert zero.bits == one.bits, case
        assert len(zero.column("trl")) == (1 if "-x 1" in case else 4) and zero.model
        losses = zero.column("trl")
        assert all(4 < loss < 6 for loss in losses), case
        assert "stage 1, " in one.out and "stage 0, " in zero.out
        if i < len(SETTINGS) - 1:
            assert max(zero.column("norm")) > 1   # so it is clipped
    # -O and, where sums have one order only, -K do not matter either
    assert outcomes[0].bits != outcomes[2].bits   # another number of micro-steps
    if precision == "fp32":
        assert outcomes[0].bits == outcomes[-1].bits
        if ranks <= 2:
            assert outcomes[0].bits == outcomes[4].bits == outcomes[8].bits
    elif ranks <= 2:
        assert outcomes[0].bits == outcomes[8].bits and outcomes[2].bits == outcomes[10].bits
        assert outcomes[0].log != outcomes[2].log   # with masters


def test_state_is_shared_out(program, tmp_path):
    zero, one = run_lines(program("fp32"), 4, tmp_path, ["-z 0", "-z 1"])
    sizes = [len(outcome.state(4, rank)) for outcome in (zero, one) for rank in range(4)]
    assert len(set(sizes[:4])) == 1
    # m, v and, with -w 1, the own parameters
    assert sum(sizes[4:]) - sum(sizes[:4]) / 4 < 4 * 500 < sizes[0] / 50
    states = [zero.arrays(4, rank) for rank in range(4)]
    assert states[0] == states[1] == states[2] == states[3]
    per_rank = [int(re.search(r"m \+ v (\d+) ", outcome.out)[1]) for outcome in (zero, one)]
    assert per_rank[1] * 4 == per_rank[0] >= 2 * 4 * sum(SIZES)


def test_orders_of_execution(program, tmp_path):
    orders = ["", "CUDA_CPU_STREAMS=lazy", "CUDA_CPU_STREAMS=rush:0", "CUDA_CPU_STREAMS=rush:1",
              "CUDA_CPU_STREAMS=rush:2", "CUDA_CPU_SCHED=rev", "CUDA_CPU_STREAMS=rush:2 CUDA_CPU_SCHED=rev"]
    cases = [f"{flags} {tokens(2, 2)}" for flags in ("-z 0 -K unit", "-z 1 -K 0.02")]
    outcomes = run_lines(program("fp32"), 2, tmp_path,
                         [f"{order} {case}" for case in cases for order in orders])
    for outcome, order in zip(outcomes, orders * 2):
        assert outcome.bits == outcomes[0].bits, order
    whole = run_lines(program("fp32"), 2, tmp_path / "whole", [f"-z 0 -R allreduce {tokens(2, 2)}"])[0]
    assert whole.bits == outcomes[0].bits   # a sum of two has one order


# ---------------------------------------------------------------------------- without the patch

# Largest differences of loss, norm and parameters within four steps; as measured: 1e-6, 2.4e-7 and 3.5e-7 (a
# unit in the last place of the loss is 4.8e-7).
LOSS, NORM, PARAMETER = 3e-6, 1e-6, 1.5e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_against_the_trainer_with_mends_only(program, tmp_path, ranks):
    cases = ["", tokens(ranks, 3), "-c 0 -w 0 -l 0.003", "-t 10 -b 3"]
    ours = run_lines(program("fp32"), ranks, tmp_path / "ours", cases)
    theirs = run_lines(program("mended"), ranks, tmp_path / "theirs", cases)
    for case, a, b in zip(cases, ours, theirs):
        for name, tolerance in (("trl", LOSS), ("norm", NORM)):
            assert numpy.allclose(a.column(name), b.column(name), rtol=0, atol=tolerance), a.log + b.log
        difference = floats(a.model[MODEL_HEADER:]) - floats(b.model[MODEL_HEADER:])
        assert difference.size == sum(SIZES) and abs(difference).max() < PARAMETER, case
        assert a.model[:MODEL_HEADER] == b.model[:MODEL_HEADER]


def test_model_files_are_the_same_to_both(program, tmp_path):
    """No step: what is read is written again."""
    for ranks in (1, 3):
        base = tmp_path / str(ranks)
        first = run_lines(program("mended"), ranks, base / "a", ["-x 1 -n 1"])[0].model
        (base / "mended.bin").write_bytes(first)
        lines = [f"-e {base}/mended.bin -x 1 -n 1 -l 0 -z {z} -K {K}" for z in (0, 1)
                 for K in ("unit", "0.01")]
        for outcome in run_lines(program("fp32"), ranks, base / "b", lines):
            assert outcome.model == first
        mine = run_lines(program("fp32"), ranks, base / "c", ["-z 1"])[0].model
        (base / "fp32.bin").write_bytes(mine)
        again = run_lines(program("mended"), ranks, base / "d",
                          [f"-e {base}/fp32.bin -x 1 -n 1 -l 0"])[0].model
        assert again == mine != first


# ---------------------------------------------------------------------------- save, resume

@pytest.mark.parametrize("precision, ranks", [("fp32", 1), ("fp32", 3), ("bf16", 2)])
def test_resuming_changes_no_bit(program, tmp_path, precision, ranks):
    cases = [f"{flags} {tokens(ranks, 2)}"
             for flags in ("-z 0 -K unit", "-z 1 -K 0.01 -w 0", "-z 1 -K unit", "-z 1 -K unit")]
    lines = []
    for case in cases:
        lines += [f"{case} -x 8 -n 8", f"{case} -x 5 -n 5"]
    outcomes = run_lines(program(precision), ranks, tmp_path, lines)
    resumed = tmp_path / "resumed"
    lines = []
    for i, case in enumerate(cases):
        folder = resumed / f"{ranks} ranks, line {i}"
        shutil.copytree(outcomes[2 * i + 1].folder, folder, ignore=shutil.ignore_patterns("id", "out.*"))
        drop_masters = precision == "fp32" and i == 3   # the file has a third array, which is passed over
        lines.append(f"{case} -x 8 -n 8 -y 1" + (" -w 0" if drop_masters else ""))
    after = run_lines(program(precision), ranks, resumed, lines)
    for case, line, straight, again in zip(cases, lines, outcomes[::2], after):
        assert straight.bits == again.bits, case
        if ("-w 0" in case) == ("-w 0" in line):
            assert all(straight.state(8, rank) == again.state(8, rank) for rank in range(ranks)), case


@pytest.fixture(scope="module")
def saved(program, tmp_path_factory):
    """A run of two ranks, -z 1, that has saved step 2; and one without the patch."""
    folder = tmp_path_factory.mktemp("saved")
    ours = run_lines(program("fp32"), 2, folder, ["-z 1 -x 2 -n 2 -K unit"])[0].folder
    theirs = run_lines(program("mended"), 2, folder / "theirs", ["-x 2 -n 2"])[0].folder
    return ours, theirs


REFUSED = [(2, "-z 0", "the state file is of -z 1, 2 ranks"),
           (2, "-z 1 -K 0", "resume with the same -z, -K and ranks"),
           (1, "-z 1", "this run has -z 1, 1 ranks"), (2, "theirs", "written by llm.c without llmc_zero"),
           (2, "-z 1 -K unit, one rank", "the state file is of -z 7, 2 ranks")]


@pytest.mark.parametrize("ranks, flags, message", REFUSED)
def test_resuming_what_does_not_fit_is_refused(program, saved, tmp_path, ranks, flags, message):
    folder = shutil.copytree(saved[flags == "theirs"], tmp_path / "o")
    if "one rank" in flags:   # the other one must not wait for ever
        data = bytearray((folder / "state_00000002_00001.bin").read_bytes())
        data[STATE_HEADER + 16] = 7
        (folder / "state_00000002_00001.bin").write_bytes(data)
    flags = flags.removesuffix(", one rank").replace("theirs", "").split()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = run([program("fp32"), *DEFAULT.split(), *flags, "-y", "1", "-o", folder], ranks=ranks, timeout=30,
                 check=False)
    assert result.code != 0 and message in result.err, result.err
    assert "[llmc_zero ERROR] rank " in result.err and "step 2 loss" not in result.out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---------------------------------------------------------------------------- steps that are left out

@pytest.mark.parametrize("precision, ranks, poison",
                         [("fp32", 3, "2:1:nan"), ("bf16", 2, "2:1:inf"), ("fp32", 1, "2:0:nan")])
def test_a_gradient_that_is_not_finite_on_one_rank(program, tmp_path, precision, ranks, poison):
    cases = [f"-z {z} -w {w} {tokens(ranks, 2)}" for z in (0, 1) for w in (0, 1)]
    outcomes = run_lines(program(precision), ranks, tmp_path,
                         [f"{case} -x 6 -n 1 -a {poison}" for case in cases])
    for i, outcome in enumerate(outcomes):
        assert outcome.log == outcomes[i % 2].log and outcome.model == outcomes[i % 2].model   # both stages
        assert outcome.out.count("skipping update: the gradient is not finite") == 1
        norms, losses = outcome.column("norm"), outcome.column("trl")
        assert not numpy.isfinite(norms[2]) and numpy.isfinite(norms[:2] + norms[3:]).all()
        assert numpy.isfinite(losses[:2] + losses[3:]).all()
        read = [(outcome.folder / f"model_{step:08}.bin").read_bytes() for step in range(1, 7)]
        assert read[1] == read[2] and len(set(read)) == 5
        for rank in range(ranks):   # m and v; the header has the step
            states = [outcome.arrays(step, rank) for step in range(1, 7)]
            assert states[1] == states[2] and len(set(states)) == 5, rank


def test_outliers_are_dropped_on_all_ranks(program, tmp_path):
    """The loss of one rank is 50 times as large in step 7: -sl and -sg drop the update on both ranks."""
    cases = [f"-z {z} {flags} {tokens(2, 2)}" for flags in ("-sl 5", "-sg 5") for z in (0, 1)]
    outcomes = run_lines(program("fp32"), 2, tmp_path, [f"{case} -x 10 -n 1 -a 7:1:50" for case in cases])
    for i, outcome in enumerate(outcomes):
        assert re.findall(r"step (\d+): the (\w+) is an outlier",
                          outcome.out) == [("7", "loss" if i < 2 else "gradient")]
        assert outcome.bits == outcomes[0].bits
        for rank in (0, 1):
            states = [outcome.arrays(step, rank) for step in range(6, 11)]
            assert states[1] == states[2] and len(set(states)) == 4
    plain = run_lines(program("fp32"), 2, tmp_path / "plain",
                      [f"{cases[1].replace('-sl 5', '')} -x 10 -n 1 -a 7:1:50"])[0]
    assert plain.bits != outcomes[0].bits and plain.log.split("\n")[:8] == outcomes[0].log.split("\n")[:8]


# ---------------------------------------------------------------------------- MPI, flags

def test_under_mpi_alone(program, tmp_path):
    """Started as one starts it: the same bits as through a folder, and a good end."""
    expected = run_lines(program("fp32"), 2, tmp_path, ["-z 1"])[0]
    for name in ("fp32", "mended"):
        (tmp_path / name).mkdir()
        result = run([program(name), *DEFAULT.split(), "-z", "1", "-o", tmp_path / name], ranks=2)
        assert result.out.count("step 3 loss") == 1 and not result.err
    assert (tmp_path / "fp32/main.log").read_text() == expected.log
    assert (tmp_path / "fp32/model_00000004.bin").read_bytes() == expected.model
    assert len((tmp_path / "mended/main.log").read_text().split("\n")) == 5


BAD = [("-K wide", "-K wide: a bucket size in MB, 0 .. 1e9, or unit"), ("-K -1", "-K -1: a bucket"),
       ("-K nan", "-K nan: a bucket"), ("-K 1x", "-K 1x: a bucket"),
       ("-R ring", "-R ring: nccl or allreduce"),
       ("-O 2", "-O 2: 0 or 1"), ("-O", "-z takes 0 and 1"), ("-Q 1", "-K <string> bucket size in MB"),
       ("-KK 1", "-K <string> bucket size in MB"), ("-z 2", "-z 2: stages 0"), ("-z -1", "-z -1: stages 0"),
       ("-z 1 -R allreduce", "allreduce")]


def test_bad_flags(program, tmp_path):
    """One clear line, an exit code, and no rank that is left waiting. Most run alone, which is quicker."""
    for i, (flags, message) in enumerate(BAD):
        ranks = 3 if flags in ("-K wide", "-z 2", "-z 1 -R allreduce") else None
        where = [] if ranks else ["-pi", "fs", "-pf", tmp_path]
        (tmp_path / "id").unlink(missing_ok=True)
        result = run([program("fp32"), *where, "-x", "1", *flags.split()], ranks=ranks, check=False,
                     timeout=30)
        assert result.code != 0 and message in result.out + result.err, (flags, result)
        assert "step 0" not in result.out
        said = [line for line in (result.out + result.err).split("\n") if message in line]
        assert 1 <= len(said) <= (ranks or 1)


# ---------------------------------------------------------------------------- test_gpt2.cu, without MULTI_GPU

def test_of_the_trainer_itself(program, tmp_path):
    """Gradients are in the order of the tensors: without the patch, m is 0.1 of them, clipped."""
    for w in "01":
        run([program("test"), tmp_path, "-w", w])
    grads = numpy.fromfile(tmp_path / "grads0.bin", numpy.float32)
    theirs = run_lines(program("mended"), 1, tmp_path, ["-t 16 -x 1 -n 1"])[0]
    norm = numpy.linalg.norm(grads.astype(numpy.float64))
    state = (tmp_path / "scaled0.bin").read_bytes()[STATE_HEADER:]
    count = int(numpy.frombuffer(state[:OUR_HEADER], numpy.uint64)[5])
    m = floats(state[OUR_HEADER:])[:count].astype(numpy.float64)   # in another order, with padding
    assert count > sum(SIZES) and abs(numpy.linalg.norm(m) - 0.1 * 0.25 * norm) < 1e-7
    m = floats(theirs.state(1, 0)[STATE_HEADER:])[:sum(SIZES)]
    assert abs(norm - theirs.column("norm")[0]) < NORM and norm > 1
    at = 0
    for i, size in enumerate(SIZES):
        mine, other = grads[at:at + size] / norm, m[at:at + size] / 0.1
        assert abs(mine - other).max() < 1e-6 and abs(mine).max() > 1e-4, i
        at += size
    assert at == grads.size == m.size


@slow
@pytest.mark.parametrize("kind, ranks", [("", None), (" bf16", None), (" mpi", 2)])
def test_gradients_are_those_of_the_trainer_without_the_patch(program, tmp_path, kind, ranks):
    grads = []
    for name in ("test", "mended test"):
        run([program(name + kind), tmp_path], ranks=ranks)
        grads += [path.read_bytes() for path in sorted(tmp_path.glob("grads*.bin"))]
    assert len(grads) == 2 * (ranks or 1) and len(set(grads)) == 1 and len(grads[0]) == 4 * sum(SIZES)


@slow
def test_the_trainer_as_it_is(program, tmp_path):
    """Without the patch it trains, too; CUDA_CPU_ROUND forgives that it reduces 4 floats where it has one."""
    for name, ranks in (("unpatched", None), ("unpatched", 2), ("unpatched bf16 alone", None),
                        ("mended bf16", 2),
                        ("alone", None)):
        result = run([program(name), "-x", "60", "-l", "0.02"], ranks=ranks, env={"CUDA_CPU_ROUND": "512"})
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.out)]
        assert len(losses) == 60 and sum(losses[-10:]) < sum(losses[:10]) - 3, name


@slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_stage_1_of_the_mended_trainer(program, tmp_path, ranks):
    """Where sizes divide by the ranks, the mends make the trainer's own stages agree, and ours with them."""
    lines = [f"-e tiny:2x24 -w 0 -z {z} {tokens(ranks, 2)}" for z in (0, 1)]
    theirs = run_lines(program("mended"), ranks, tmp_path, lines)
    assert "stage 1" in theirs[1].out
    assert numpy.allclose(theirs[0].column("trl"), theirs[1].column("trl"), rtol=0, atol=LOSS)
    ours = run_lines(program("fp32"), ranks, tmp_path / "ours", lines)
    assert numpy.allclose(theirs[1].column("trl"), ours[1].column("trl"), rtol=0, atol=LOSS)
