"""Checkpoints of train_mlp from the outside: resumed runs against straight ones, kills, full disks, damaged files,
other people's files. What single calls do is in test_checkpoint.cu."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 then)
import numpy as np
import pytest
import xxhash
from conftest import LONG, TOP, end, own_lines, run, slow, start
from safetensors import safe_open
from train_lines import PROGRAM, STREAM_MODES

TOOL = str(TOP / "dev/checkpoint.py")
SMALL = "-L 3 -C 24 -b 2 -I split -l 0.002 -G 0.5"
KINDS = {"fp32": "", "fp32 sgd": "-U sgd", "fp32 adamw": "-U adamw -c 0.01 -z 0",
         "masters": "-P bf16 -K 0.001",
         "stochastic": "-P bf16 -w 0", "stochastic sgd": "-P bf16 -w 0 -U sgd -z 0 -K unit",
         "stage 2": "-z 2 -P bf16 -R ordered", "stage 3": "-z 3 -K 0.001", "stage 3 stochastic": "-z 3 -P bf16 -w 0"}


def lines(commands, ranks, folder):
    """Runs command lines one after another in one process a rank; their errors or None, and what was printed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lines.txt").write_text("\n".join(commands) + "\n")
    result = run([str(TOP / PROGRAM), str(folder / "lines.txt")], ranks=ranks, timeout=LONG)
    ends = re.findall(r"^line (\d+): (ok|error: .*)$", result.out, re.M)
    assert len(ends) == len(commands), result.out[-2000:] + result.err[-2000:]
    return [None if end == "ok" else end[7:] for _, end in ends], result.out


def path_of(folder, step):
    return folder / f"step_{step:08d}.safetensors"


def steps_in(folder):
    return sorted(int(path.name[5:13]) for path in folder.glob("step_*.safetensors"))


def bits(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return (folder / "main.log").read_text(), summary["params_hash"], summary["params_sum"], summary["steps"]


def tensors(path):
    with safe_open(path, framework="numpy") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}   # noqa: SIM118 (no dict)


def check_one_line(result, words):
    assert result.code != 0
    ours = own_lines(result.err, "train_mlp")
    assert len(ours) == 1, result.err
    for word in words:
        assert word in ours[0], ours[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """10 steps at once, and 5 + 5 with a resume, of every kind, on 2 ranks."""
    top = tmp_path_factory.mktemp("straight")
    commands = []
    for kind, flags in KINDS.items():
        a, b = top / kind.replace(" ", "_") / "a", top / kind.replace(" ", "_") / "b"
        base = f"{SMALL} -d 12 {flags}"
        commands += [f"{base} -x 10 -o {a}", f"{base} -x 5 -n 5 -o {b}", f"{base} -x 10 -n 2 -y 1 -o {b}"]
    errors, out = lines(commands, 2, top)
    assert errors == [None] * len(commands)
    return top, out


@pytest.mark.parametrize("kind", KINDS)
def test_five_and_five_are_ten(kind, straight):
    """Cases E1, G4: log, parameters and sums to the bit."""
    top = straight[0] / kind.replace(" ", "_")
    assert bits(top / "a") == bits(top / "b")
    assert steps_in(top / "b") == [5, 6, 8, 10]


def test_another_number_of_ranks_goes_on_with_the_same_samples(straight, tmp_path):
    """-I split: the loss of each step within 1e-5, on 1 and 3 ranks, in the other stage."""
    top = straight[0] / "fp32"
    for ranks in (1, 3):
        target = tmp_path / str(ranks)
        target.mkdir()
        for name in ("main.log", path_of(target, 5).name):
            shutil.copy(top / "b" / name, target)
        errors, _ = lines([f"{SMALL} -d 12 -z 0 -K 0.001 -x 10 -n 10 -y 1 -o {target}"], ranks, tmp_path)
        assert errors == [None]
        loss = [re.findall(r"trl:(\S+)", (folder / "main.log").read_text()) for folder in (top / "a", target)]
        assert len(loss[0]) == len(loss[1]) == 10
        np.testing.assert_allclose(np.array(loss[0], float), np.array(loss[1], float), rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("kind", ["-P bf16", "-P bf16 -w 0"])
def test_a_run_may_change_its_stage(kind, ranks, tmp_path):
    """With -R ordered -A micro a run that goes through all stages has the bits of one that stays in stage 1."""
    base = f"{SMALL} {kind} -d {8 * ranks} -R ordered -A micro"
    commands = [f"{base} -x 8 -o {tmp_path / 'one'}"]
    plans = ("-z 3", "-z 0 -K 0", "-z 2", "-z 1 -K 0.001", "-z 3 -K 0.001 -O 0", "-z 2 -O 0", "-z 0 -O 0", "-z 3")
    for steps, plan in enumerate(plans):
        commands.append(f"{base} -x {steps + 1} -n 1 -y 1 -o {tmp_path / 'all'} {plan}")
    errors, _ = lines(commands, ranks, tmp_path)
    assert errors == [None] * len(commands)
    assert bits(tmp_path / "one") == bits(tmp_path / "all")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_order_of_the_streams(stage, tmp_path):
    """Copies to and from the file are ordered against update and gather, whatever runs first."""
    base = f"{SMALL} -z {stage} -P bf16 -K 0.001 -x 4"
    commands = [f"{base} -o {tmp_path / 'straight'}"]
    for number, mode in enumerate(STREAM_MODES):
        out = tmp_path / str(number)
        commands += [f"{mode} {base} -x 2 -n 1 -o {out}", f"{mode} {base} -n 1 -y 1 -o {out}"]
    errors, _ = lines(commands, 2, tmp_path)
    assert errors == [None] * len(commands)
    for number, mode in enumerate(STREAM_MODES):
        assert bits(tmp_path / str(number)) == bits(tmp_path / "straight"), mode


def test_the_log_never_has_two_lines_for_a_step(straight, tmp_path):
    top = straight[0] / "fp32"
    shutil.copy(path_of(top / "b", 5), tmp_path)
    text = (top / "a/main.log").read_text()
    (tmp_path / "main.log").write_text(text + "s:11 trl:1 lr")       # goes on behind step 5, and broke off
    errors, _ = lines([f"{SMALL} -d 12 -x 10 -y 1 -o {tmp_path}"], 2, tmp_path)
    assert errors == [None] and (tmp_path / "main.log").read_text() == text
    assert not (tmp_path / "main.log.tmp").exists()
    assert steps_in(tmp_path) == [5]                                 # no -n: nothing is saved


def test_a_log_that_lost_lines_is_said(straight, tmp_path):
    """A missing or short main.log does not stop a resumed run; a line says which steps it lacks."""
    top = straight[0] / "fp32"
    text = (top / "a/main.log").read_text()
    shutil.copy(path_of(top / "b", 5), tmp_path)
    flags = f"{SMALL} -d 12 -x 10 -y 1 -o {tmp_path}"
    _, out = lines([flags], 2, tmp_path)
    assert f"warning: {tmp_path}/main.log is missing: the lines of steps 1 to 5 are lost" in out
    assert (tmp_path / "main.log").read_text() == "".join(text.splitlines(True)[5:])
    (tmp_path / "main.log").write_text("".join(text.splitlines(True)[:3]))
    _, out = lines([flags], 2, tmp_path)
    assert f"warning: {tmp_path}/main.log ends at step 3: the lines up to step 5 are lost" in out


def test_a_finished_run_started_again_says_the_same(straight, tmp_path):
    """Nothing is left to do, or -x lies below the checkpoint: log and summary stay as they are."""
    top = straight[0] / "fp32/b"
    for name in ("main.log", path_of(top, 10).name, "summary.json"):
        shutil.copy(top / name, tmp_path)
    for steps in (10, 7):
        errors, out = lines([f"{SMALL} -d 12 -x {steps} -y 1 -o {tmp_path}"], 2, tmp_path)
        assert errors == [None] and f"nothing is left to do: -x {steps}" in out
        assert bits(tmp_path) == bits(top)
        summary, before = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path, top))
        assert [summary[key] for key in ("loss", "norm")] == [before[key] for key in ("loss", "norm")]


def test_skipped_steps_are_counted_on(tmp_path):
    """Gradients overflow after the first update: 7 steps, or 3 and 4 with a resume, report the same skips."""
    flags = "-L 2 -C 24 -b 2 -I split -U sgd -M 0 -l 1e25"
    errors, _ = lines([f"{flags} -x 7 -o {tmp_path / 'a'}", f"{flags} -x 3 -n 3 -o {tmp_path / 'b'}",
                       f"{flags} -x 7 -y 1 -o {tmp_path / 'b'}"], 2, tmp_path)
    assert errors == [None] * 3
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    skipped = [json.loads((tmp_path / name / "summary.json").read_text())["skipped"] for name in "ab"]
    assert skipped[0] == skipped[1] >= 4


def test_names_of_all_kinds_open_in_python(tmp_path):
    """10,000 tensors with names that JSON escapes, of no dimension, of no element, written by 3 ranks."""
    path = tmp_path / "many.safetensors"
    run([str(TOP / "build/test/test_checkpoint"), "--gtest_filter=*ManySmall*"], ranks=3,
        env={"ZERO_TEST_KEEP": str(path)})
    found = tensors(path)
    assert len(found) == 30000
    element = 0
    for i in range(10000):
        count = 1 if i % 5 == 0 else (i % 5 - 1) * 3
        value = found[f'"layer" {i} \\ é\n\x01 header_xxh3":"']
        assert value.shape == (() if i % 5 == 0 else (3, count // 3))
        np.testing.assert_array_equal(value.ravel(), np.arange(element, element + count, dtype=np.float32))
        element += count
    assert ": whole" in run([TOOL, "verify", path]).out


def test_safetensors_and_the_tool_read_it(straight):
    """Real shapes; the tool's checksums, table and difference."""
    top = straight[0]
    plain, masters, narrow = (path_of(top / kind / "b", 10) for kind in ("fp32", "masters", "stochastic"))
    found = tensors(plain)
    assert {name: value.shape for name, value in found.items()} == {
        f"{layer}.{name}{array}": (24, 24) if name == "weight" else (24,)
        for layer in range(3) for name in ("weight", "bias") for array in ("", ".exp_avg", ".exp_avg_sq")}
    with safe_open(plain, framework="numpy") as handle:
        metadata = handle.metadata()
    wanted = {"step": "10", "t": "10", "samples": "120", "optimizer": "adam", "beta1": "0.9", "beta2": "0.999",
                  "eps": "1e-08", "seed": "0", "data": "split", "type": "fp32"}
    assert wanted.items() <= metadata.items()
    assert not {"ranks", "stage", "version", "date"} & set(metadata), "whoever wrote it"
    verified = run([TOOL, "verify", plain, masters, narrow])
    assert verified.out.count(": whole") == 3
    shown = run([TOOL, "show", plain]).out
    norm = np.sqrt((found["1.bias"].astype(np.float64) ** 2).sum())
    assert f"{norm:.9g}" in re.search(r"^ +1\.bias +F32 +\[24\] +(\S+)", shown, re.M)[1]
    assert "BF16" in run([TOOL, "show", narrow]).out
    assert run([TOOL, "diff", plain, plain]).out == "0 of 18 tensors differ\n"
    other = run([TOOL, "diff", plain, path_of(top / "fp32/b", 5)], check=False)
    assert other.code == 1 and "18 of 18 tensors differ" in other.out and "step: 10 | 5" in other.out


def test_the_tool_finds_damage(straight, tmp_path):
    good = path_of(straight[0] / "fp32/b", 10).read_bytes()
    bad = tmp_path / "bad.safetensors"
    for at in (len(good) - 1, 66000, good.index(b'"step":"') + 8):
        bad.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
        result = run([TOOL, "verify", bad], check=False)
        assert result.code == 1 and "checksum" in result.out
    bad.write_bytes(good[:3000])
    assert run([TOOL, "verify", bad], check=False).code == 2
    assert run([TOOL, "show", TOP / "Makefile"], check=False).code == 2
    assert run([TOOL, "verify", tmp_path / "nowhere"], check=False).code == 2


def test_the_tool_needs_numpy_or_xxhash_alone(straight, tmp_path):
    """show and diff of both types say the same without what else .venv has; what is missing is one line."""
    plain, narrow = (path_of(straight[0] / kind / "b", step) for kind, step in (("fp32", 10), ("stochastic", 10)))
    older = path_of(straight[0] / "stochastic/b", 5)
    commands = [["show", plain, narrow], ["diff", narrow, older]]

    def without(*packages):
        folder = tmp_path / "_".join(packages)
        folder.mkdir()
        for package in packages:
            (folder / f"{package}.py").write_text("raise ImportError('not\\nthere')\n")
        return {"PYTHONPATH": str(folder)}

    expected = [run([TOOL, *command], check=False) for command in commands]
    assert [result.code for result in expected] == [0, 1]
    numpy_alone = without("ml_dtypes", "safetensors", "xxhash")
    assert [run([TOOL, *command], check=False, env=numpy_alone) for command in commands] == expected
    xxhash_alone = without("ml_dtypes", "safetensors", "numpy")
    assert run([TOOL, "verify", plain, narrow], env=xxhash_alone).out.count(": whole") == 2
    lacking = [(["verify", plain], "xxhash", numpy_alone), *((command, "numpy", xxhash_alone) for command in commands)]
    for command, package, env in lacking:
        result = run([TOOL, *command], check=False, env=env)
        assert result.code == 2 and not result.out and "Traceback" not in result.err
        said, = own_lines(result.err, "checkpoint.py: ")
        assert re.fullmatch(rf"checkpoint.py: {command[0]} needs {package}: \S+ -m pip install {package}", said), said


def test_the_tool_reads_bf16_as_it_is(straight):
    """Norm and largest of the table, and the difference, against ml_dtypes."""
    a, b = (path_of(straight[0] / "stochastic/b", step) for step in (10, 5))
    x, y = (tensors(path)["1.weight"].astype(np.float64) for path in (a, b))
    row = re.search(r"^ +1\.weight +BF16 +\[24, 24\] +(\S+) +(\S+) *$", run([TOOL, "show", a]).out, re.M)
    assert row.groups() == (f"{np.sqrt((x * x).sum()):.9g}", f"{np.abs(x).max():.9g}")
    gap, at = np.abs(x - y), np.abs(x - y).argmax()
    assert (f"1.weight: {(gap > 0).sum()} of 576 elements differ, by {gap.flat[at]:.9g} at element {at}: {x.flat[at]:.9g} | "
            f"{y.flat[at]:.9g}\n") in run([TOOL, "diff", a, b], check=False).out


@pytest.mark.parametrize("old, new", [
    (b'"F32"', b'"F16"'), (b'"F32"', b'[[3]]'), (b'"shape":[24]', b'"shape":[23]'), (b'"shape":[24]', b'"shape":"24"'),
    (b'"shape":[24]', b'"shape":2.40'), (b'"shape":[24,24]', b'"shape":[-4,-4]'),
    (b'"data_offsets":[0,', b'"data_offsets":[1,'), (b'"data_offsets"', b'"data-offsets"'),
    (b'"pieces":"0 ', b'"pieces":"x '), (b'"pieces"', b'"pieced"'),
    (b'"__metadata__":{', b'"__metadata__":['), (b'{"', b'["'), (b"llmc_zero.checkpoint 1", b"llmc_zero.checkpoint 2"),
    (b'"step"', b'"st\xffp"')])
def test_the_tool_says_what_it_cannot_read(straight, tmp_path, old, new):
    good = path_of(straight[0] / "fp32/b", 10).read_bytes()
    assert old in good[8:] and len(old) == len(new)
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(good[:8] + good[8:].replace(old, new, 1))
    for command in ("show", "verify"):
        result = run([TOOL, command, bad], check=False)
        assert result.code == 2 and "Traceback" not in result.err
        assert len(own_lines(result.err, f"checkpoint.py: {bad}: ")) == 1, result.err


def test_the_tool_sees_a_cut_off_file(straight, tmp_path):
    good = path_of(straight[0] / "fp32/b", 10).read_bytes()
    bad = tmp_path / "bad.safetensors"
    for length, codes in ((len(good) - 1, (2, 1)), (0, (2, 2)), (9, (2, 2)), (3000, (2, 2))):
        bad.write_bytes(good[:length])
        for command, code in zip(("show", "verify"), codes):
            result = run([TOOL, command, bad], check=False)
            assert result.code == code and "Traceback" not in result.err, result.err


def test_bytes_that_nobody_wrote(straight):
    """Every byte of a header, 1,000 others, every length, hostile headers: all refused in words."""
    for kind in ("fp32", "stochastic_sgd"):
        result = run([str(TOP / "build/test/safetensors_program"), path_of(straight[0] / kind / "b", 10)])
        assert re.search(r"^\d{5,} refused, 0 not$", result.out, re.M)


def test_other_runs_are_refused_with_both_values(straight, tmp_path):
    """Cases E2, G4; nothing of the directory changes."""
    cases = {"-U sgd": ["optimizer", "adam", "sgd"], "-B1 0.8": ["beta1", "0.9", "0.8"],
             "-E 1e-6": ["eps", "1e-08", "1e-06"],
             "-c 0.1": ["weight_decay", "the file has 0,", "0.1"], "-S 7": ["seed", "has 0,", "run 7"],
             "-I own": ["data", "split", "own"], "-C 25": ["0.weight", "[24,24]", "[25,25]"],
             "-L 2": ["tensor 4", "2.weight F32", "0.weight.exp_avg"], "-L 4": ["tensor 6", "3.weight"],
             "-P bf16 -w 0": ["type", "has fp32,", "bf16 with stochastic rounding"]}
    shutil.copy(path_of(straight[0] / "fp32/b", 10), tmp_path)
    (tmp_path / "summary.json").write_text("the older run's")
    before = sorted(path.name for path in tmp_path.iterdir())
    commands = [f"{SMALL} -x 12 -y 1 -o {tmp_path} {flags}" for flags in cases]
    errors, _ = lines(commands, 2, tmp_path.parent / "refused")
    for (flags, words), error in zip(cases.items(), errors):
        assert error and error.startswith("-y 1: "), flags
        for word in words:
            assert word in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    fp32_to_masters = f"{SMALL} -x 12 -y 1 -o {tmp_path} -P bf16"
    errors, out = lines([fp32_to_masters], 2, tmp_path.parent / "types")
    assert errors == [None] and "saved in fp32, loaded into bf16 with fp32 masters" in out


def test_resume_takes_the_newest_whole_file_and_says_why(straight, tmp_path):
    for step in (5, 6, 8, 10):
        shutil.copy(path_of(straight[0] / "fp32/b", step), tmp_path)
    data = bytearray(path_of(tmp_path, 10).read_bytes())
    data[-5] ^= 1
    path_of(tmp_path, 10).write_bytes(data)
    path_of(tmp_path, 8).write_bytes(data[:-1])
    (tmp_path / "step_00000099.safetensors.tmp").write_text("left over")
    errors, out = lines([f"{SMALL} -d 12 -x 7 -n 1 -nk 2 -y 1 -o {tmp_path}"], 2, tmp_path.parent / "newest")
    assert errors == [None]
    assert re.search(r"passed over: .*step_00000010.*damaged.*\npassed over: .*step_00000008.*bytes.*\n"
                     r"resumed from step 6 in", out)
    assert steps_in(tmp_path) == [6, 7]             # what was passed over does not count among the last 2, nor is it lost
    assert sorted(path.name for path in tmp_path.glob("*.damaged")) == [
        "step_00000008.safetensors.damaged", "step_00000010.safetensors.damaged"]
    assert not list(tmp_path.glob("*.tmp"))
    for step in (6, 7):
        path_of(tmp_path, step).write_bytes(b"")
    errors, _ = lines([f"{SMALL} -d 12 -x 7 -y 1 -o {tmp_path}"], 2, tmp_path.parent / "newest")
    assert "none of 2 checkpoints" in errors[0]


def with_string(path, key, value):
    """The file's bytes with another string in its header, and the checksum that belongs to it."""
    data = path.read_bytes()
    end, zeros = 8 + int.from_bytes(data[:8], "little"), b"0" * 16
    old = json.loads(data[8:end])["__metadata__"]
    text = data[8:end].replace(f'"{key}":"{old[key]}"'.encode(), f'"{key}":"{value}"'.encode())
    text = len(text).to_bytes(8, "little") + text.replace(old["header_xxh3"].encode(), zeros)
    return text.replace(zeros, xxhash.xxh3_64_hexdigest(text).encode(), 1) + data[end:]


def test_numbers_above_63_bits_are_passed_over(straight, tmp_path):
    """Case R5: the checksums are right; each is said with its value, and an older file goes on."""
    top = straight[0] / "fp32/b"
    for step, key, value in ((6, "samples", 2 ** 63), (8, "t", 2 ** 64 - 1), (2 ** 63, "step", 2 ** 63)):
        path_of(tmp_path, step).write_bytes(with_string(path_of(top, min(step, 10)), key, value))
    path_of(tmp_path, 10).write_bytes(with_string(path_of(top, 10), "samples", 2 ** 63 - 1))     # at the limit: as before
    shutil.copy(path_of(top, 5), tmp_path)
    verified = run([TOOL, "verify", *sorted(tmp_path.iterdir())], check=False)
    assert verified.code == 1 and verified.out.count(": whole") == 2, verified.out
    path_of(tmp_path, 10).unlink()
    errors, out = lines([f"{SMALL} -d 12 -x 7 -y 1 -o {tmp_path}"], 2, tmp_path.parent / "above")
    assert errors == [None] and "resumed from step 5" in out
    passed_over = re.findall("^passed over: (.*)$", out, re.M)
    assert len(passed_over) == 3
    for said, (key, value) in zip(passed_over, (("step", 2 ** 63), ("t", 2 ** 64 - 1), ("samples", 2 ** 63))):
        assert f'{key} is "{value}"; a whole number up to 2^63 - 1 is needed' in said
        assert f"{key} is '{value}'; a whole number up to 2^63 - 1 is needed" in verified.out


def test_an_older_runs_directory_is_not_mixed_with_a_new_run(tmp_path):
    """Case LC10."""
    errors, out = lines([f"{SMALL} -x 2 -n 1 -nk 1 -y 1 -o {tmp_path}", f"{SMALL} -x 1 -n 1 -o {tmp_path}",
                         f"{SMALL} -x 1 -n 1", f"{SMALL} -y 1", f"{SMALL} -nk 2 -o {tmp_path}/x",
                         f"{SMALL} -x 2 -y 1 -o {tmp_path}"], 2, tmp_path.parent / "older")
    assert errors[0] is None and f"no checkpoint in {tmp_path}: starting anew" in out
    assert f"-o {tmp_path}" in errors[1] and "up to step 2" in errors[1] and "-y 1" in errors[1]
    assert "-n 1" in errors[2] and "-y 1" in errors[3] and "-nk 2" in errors[4]
    assert errors[5] is None and "nothing is left to do" in out
    assert steps_in(tmp_path) == [2]


# ---- interruptions ----------------------------------------------------------------------------------------

def start_ranks(flags, ranks, folder, env=None):
    """Ranks without mpirun, so that each can be killed alone. `folder`: where they meet."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["./train_mlp", "-pi", "fs", "-pf", folder, "-pn", ranks, *flags.split()]
    return [start([*words, "-pr", rank], env) for rank in range(ranks)]


def wait_for_meeting(folder, ranks):
    """Until each of the ranks has seen the others: one that dies earlier has never been there, and is waited for."""
    met = set()
    while len(met) < ranks:
        time.sleep(0.005)
        met |= {name[-1] for name in os.listdir(folder) if re.search(r"\.run\.\w+\.[1-9]\d*\.\d$", name)}


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return line
    pytest.fail("it ended before step " + str(step))


def test_sigterm_saves_and_ends_well(tmp_path):
    """One rank alone hears of it: all stop behind the same step; resumed, it is the run that was not stopped."""
    flags = f"{SMALL} -n 1000000 -o {tmp_path / 'a'}"
    processes = start_ranks(f"{flags} -x 1000000", 2, tmp_path / "meet")
    wait_for_step(processes[0], 5)
    processes[1].send_signal(signal.SIGTERM)
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    stopped = int(re.search(r"stopped by a signal after step (\d+) of", outputs[0][0])[1])
    assert steps_in(tmp_path / "a") == [stopped]
    last = stopped + 3
    errors, _ = lines([f"{flags} -x {last} -y 1", f"{SMALL} -x {last} -o {tmp_path / 'b'}"], 2, tmp_path)
    assert errors == [None, None]
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_two_runs_do_not_share_a_directory(tmp_path):
    """The second is refused in a line, the first goes on; when it has ended, however it did, the next may begin."""
    flags = f"{SMALL} -n 1000000 -y 1 -o {tmp_path / 'run'}"
    processes = start_ranks(f"{flags} -x 1000000", 2, tmp_path / "meet")
    wait_for_step(processes[0], 3)
    check_one_line(run(["./train_mlp", *flags.split(), "-x", "5"], ranks=2, check=False),
                   ["-o ", "another run is writing there"])
    processes[1].send_signal(signal.SIGTERM)
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert lines([f"{flags} -x 1", f"{flags} -x 1"], 2, tmp_path)[0] == [None, None]


def kill_rounds(rounds, tmp_path, seed):
    """kill -9 of one rank or all at random moments of a run that does little but save; then a straight run's bits. 13 of
    20 moments come after some saves of that round, the others about its start."""
    rng = random.Random(seed)
    out, model = tmp_path / "run", "-L 2 -C 200 -b 1 -I split -l 0.001"
    saved = 0
    for number in range(rounds):
        printed, saves, meet = "", rng.randrange(-6, 14), tmp_path / f"meet{number}"
        # who dies before NCCL has them all is found by NCCL's time limit alone
        processes = start_ranks(f"{model} -n 1 -nk 2 -y 1 -x 1000000 -o {out}", 2, meet,
                                {"CUDA_CPU_TIMEOUT": "20"} if saves <= 0 else None)
        wait_for_meeting(meet, 2)
        while printed.count("\nsaved ") < saves:
            line = processes[0].stdout.readline()
            assert line, printed + processes[0].stderr.read()
            printed += line
        time.sleep(rng.random() * (0.1 if saves > 0 else 0.5))
        for process in processes if rng.random() < 0.5 else [rng.choice(processes)]:
            process.kill()
        printed += [end(process) for process in processes][0][0]
        assert "passed over" not in printed, "a bad file stood under a good name"
        resumed = re.search(r"resumed from step (\d+)", printed)
        if resumed:
            assert int(resumed[1]) >= saved, f"round {number}: more than one interval is lost"
        steps = re.findall(r"^saved \S+step_(\d+)", printed, re.M)
        saved = max([saved, *map(int, steps)])
    assert saved > rounds
    verified = run([TOOL, "verify", *out.glob("step_*.safetensors")])
    assert ": whole" in verified.out
    last = max(steps_in(out)) + 2
    commands = [f"{model} -n 100 -y 1 -x {last} -o {out}", f"{model} -x {last} -o {tmp_path / 'straight'}"]
    errors, _ = lines(commands, 2, tmp_path)
    assert errors == [None, None]
    assert bits(out) == bits(tmp_path / "straight")


def test_killed_while_saving(tmp_path):
    """Case F1."""
    kill_rounds(6, tmp_path, 1)


@slow
def test_killed_while_saving_many_times(tmp_path):
    kill_rounds(50, tmp_path, 2)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_rank_that_may_not_write_so_much(limited, tmp_path):
    """Case F6: EFBIG on one rank only. The older checkpoint stays, one line, nothing temporary."""
    out = tmp_path / "run"
    flags = f"-L 2 -C 600 -b 2 -n 5 -nk 2 -y 1 -o {out}"
    processes = start_ranks(f"{flags} -x 1000000", 2, tmp_path / "meet")
    for line in processes[0].stdout:
        if line.startswith("saved "):
            break
    resource.prlimit(processes[limited].pid, resource.RLIMIT_FSIZE, (2000000, 2000000))   # rank 0 writes up to 4 MB
    outputs = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    error = "".join(err for _, err in outputs)
    assert error.count("train_mlp: ") == 1 and "step_000" in error and "File too large" in error
    assert f"rank {limited}: " in error and not list(out.glob("*.tmp"))
    last = max(steps_in(out))
    errors, printed = lines([f"{flags} -x {last + 5}"], 2, tmp_path)
    assert errors == [None] and f"resumed from step {last}" in printed and steps_in(out) == [last, last + 5]


def test_a_small_disk(tmp_path):
    """The same with a real full file system, and with one that became read-only; as root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        flags = f"-L 2 -C 100 -b 2 -n 5 -y 1 -o {disk}"      # 308 KB a file
        assert lines([f"{flags} -x 5"], 2, tmp_path)[0] == [None]
        check_one_line(run(["./train_mlp", *flags.split(), "-x", "10"], ranks=2, check=False),
                       ["step_00000010.safetensors", "No space left"])
        assert steps_in(disk) == [5] and not list(disk.glob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        check_one_line(run(["./train_mlp", *flags.split(), "-x", "10"], ranks=2, check=False),
                       ["-o ", "Read-only"])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_something_else_stands_where_the_file_should(tmp_path):
    """Case F2: a directory of the file's name, or of the temporary file's: a common error, soon."""
    flags = f"{SMALL} -n 5 -y 1 -o {tmp_path}".split()
    assert lines([" ".join(flags) + " -x 5"], 2, tmp_path.parent / "else")[0] == [None]
    for name in ("step_00000010.safetensors", "step_00000010.safetensors.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
        check_one_line(run(["./train_mlp", *flags, "-x", "10"], ranks=2, check=False),
                       ["step_00000010.safetensors", "directory"])
        shutil.rmtree(tmp_path / name)
    assert steps_in(tmp_path) == [5]


@slow
def test_bytes_moved_by_saving_and_loading(tmp_path):
    """80M parameters, 960 MB, on 2 ranks, to a new name and over an older file: written once, read twice (all is checked
    before anything is loaded), and at most 64 MB of host memory a rank. How long it takes the program prints."""
    file = tmp_path / "file"
    out = run([str(TOP / "build/test/save_program"), file], ranks=2, timeout=LONG).out
    megabytes = file.stat().st_size / 1e6
    rows = re.findall(r"^(save|load)\b.* s: written (\S+) MB, read (\S+) MB, host memory \+ (\S+) MB", out, re.M)
    assert [what for what, *_ in rows] == ["save", "load"] * 2 and megabytes > 960, out
    for what, *numbers in rows:
        written, read, memory = map(float, numbers)
        expected = (megabytes, 0.0) if what == "save" else (0.0, 2 * megabytes)
        assert abs(written - expected[0]) < 1 and abs(read - expected[1]) < 1 and memory < 64, out


def test_ranks_with_other_working_directories(tmp_path):
    """Case N14: a relative -o that is another folder on rank 1: one line before the first step, and no file."""
    meet, homes = tmp_path / "meet", [tmp_path / "a", tmp_path / "b"]
    meet.mkdir()
    words = [TOP / "train_mlp", "-pi", "fs", "-pf", meet, "-pn", "2", *f"{SMALL} -x 9 -n 9 -o run".split()]
    for present in (False, True):    # there is no such folder on rank 1, or one without the file
        processes = []
        for rank, home in enumerate(homes):
            (home / "run").mkdir(parents=True) if present and rank else home.mkdir()
            processes.append(start([*words, "-pr", rank], cwd=home))
        outputs = [end(process) for process in processes]
        assert [process.returncode for process in processes] == [1, 1]
        error = [line for _, err in outputs for line in own_lines(err, "train_mlp")]
        assert len(error) == 1 and "-o run -n 9: this run could not be saved as step_00000009" in error[0]
        assert "all ranks must see one folder" in error[0] and "step 1/" not in outputs[0][0]
        assert not list(tmp_path.rglob("step_*"))
        for home in homes:
            shutil.rmtree(home)
