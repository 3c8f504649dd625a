"""Runs many train_mlp command lines with one start of the ranks (test/train_program.cu)."""

import hashlib
import json
import re
from pathlib import Path

from conftest import LONG, TOP, run

STREAM_MODES = ["", "CUDA_CPU_STREAMS=lazy", "CUDA_CPU_STREAMS=rush:0", "CUDA_CPU_STREAMS=rush:1",
                "CUDA_CPU_STREAMS=rush:2 CUDA_CPU_SCHED=rev", "CUDA_CPU_STREAMS=threads"]
PROGRAM = "build/test/train_program"


class Outcome:
    """What one line left behind: error text or None, main.log, summary."""

    def __init__(self, error, folder):
        self.error = error
        self.log = (folder / "main.log").read_text() if error is None else None
        self.summary = json.loads((folder / "summary.json").read_text()) if error is None else None
        self.files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                      for path in folder.glob("step_*.safetensors")} if error is None else None

    def bits(self):
        """Everything that must be equal between two runs that are the same to the bit."""
        return None if self.error else (self.log, *(self.summary[key] for key in ("params_hash", "run_hash", "params_sum")))

    def column(self, name):
        return [float(value) for value in re.findall(rf"\b{name}:(\S+)", self.log)]


def run_lines(lines, ranks, folder, program=PROGRAM, env=None):
    """lines: flags, or 'NAME=VALUE ... flags'; returns their Outcomes in order, and everything printed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder / f"line{i}" for i in range(len(lines))]
    (folder / "lines.txt").write_text("".join(f"{line} -o {out}\n" for line, out in zip(lines, folders)))
    result = run([str(TOP / program), str(folder / "lines.txt")], ranks=ranks, timeout=LONG, env=env)
    errors = {}
    for number, error in re.findall(r"^line (\d+): (ok|error: .*)$", result.out, re.M):
        errors[int(number) - 1] = None if error == "ok" else error[len("error: "):]
    assert len(errors) == len(lines), result.out[-3000:] + result.err[-3000:]
    return [Outcome(errors[i], folders[i]) for i in range(len(lines))], result.out + result.err


def check_ok(outcomes, lines):
    for line, outcome in zip(lines, outcomes):
        assert outcome.error is None, f"{line}: {outcome.error}"
