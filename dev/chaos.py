#!/usr/bin/env python3
"""Kills a run of train_mlp again and again, and starts it anew on another number of ranks, in another stage and with other
buckets, until it is done; then compares it with a run on one rank that nobody disturbed: log, run hash, and the last file's
SHA-256.

    dev/chaos.py --kills 100 --seed 1

One rank or all are killed (SIGKILL), at a random moment or while a checkpoint is being written, or told to stop (SIGTERM).
Ranks start under mpirun or without it (-pi fs). The seed decides what is done; when exactly it happens, the machine does.
Exit code 0: no difference; 1: one, or ranks that did not end; 2: the program could not be run.
"""

import argparse
import atexit
import contextlib
import hashlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launch

BASE = "-I split -b 4 -d 48 -L 3 -C 67 -l 3e-3 -R ordered -G 0.15"
KINDS = ("-P fp32", "-P bf16", "-P bf16 -w 0")
GIVE_UP = 300   # seconds until ranks that do not end are called hung


class Attempt:
    """One start of all ranks; `command` is the trainer's."""

    def __init__(self, command, ranks, meeting, where):
        self.files = [open(where / f"out.{rank}", "w+") for rank in range(ranks if meeting else 1)]   # noqa: SIM115 (until end)
        if meeting:
            meeting.mkdir(exist_ok=True)
            starts = [[*command, "-pi", "fs", "-pf", str(meeting), "-pn", str(ranks), "-pr", str(rank)]
                      for rank in range(ranks)]
        else:
            starts = [launch.command(ranks, command)]
        self.processes = [subprocess.Popen(start, cwd=launch.TOP, env=launch.environment(), stdout=file, stderr=file,
                                           stdin=subprocess.DEVNULL, start_new_session=True)
                          for start, file in zip(starts, self.files)]
        self.meeting, self.name = meeting, Path(command[0]).name
        atexit.register(self.kill)   # whatever ends this script

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)   # each is the first of a session

    def ranks(self):
        """Process numbers of the trainer's ranks that live."""
        if self.meeting:
            return [process.pid for process in self.processes if process.poll() is None]
        found, left = [], [process.pid for process in self.processes]
        while left:   # mpirun's children, and theirs
            try:
                left += map(int, Path(f"/proc/{left[0]}/task/{left[0]}/children").read_text().split())
                found += [left[0]] if Path(f"/proc/{left[0]}/exe").resolve().name == self.name else []
            except OSError:
                pass
            left.pop(0)
        return found

    def running(self):
        return any(process.poll() is None for process in self.processes)

    def end(self):
        """Waits; kills what hangs and returns False then."""
        limit, ended = time.monotonic() + GIVE_UP, True
        for process in self.processes:
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = False
                self.kill()
        self.text = ""
        for file in self.files:
            file.seek(0)
            self.text += file.read()
            file.close()
        return ended


def wait_until(attempt, happened):
    limit = time.monotonic() + GIVE_UP
    while attempt.running() and not happened() and time.monotonic() < limit:
        time.sleep(0.001)


def disturb(attempt, folder, how, draw):
    """Once the ranks have met, waits for the moment and sends the signal. Returns whether anybody was there to get it."""
    met = folder.parent / "out.0"
    wait_until(attempt, lambda: "train_mlp:" in met.read_text())
    if how["moment"] == "save":
        wait_until(attempt, lambda: list(folder.glob("*.tmp")))
        time.sleep(draw.uniform(0, 0.02))
    else:
        time.sleep(draw.uniform(0, 2.0))
    targets = attempt.ranks()
    if how["whom"] == "one" and targets:
        targets = [draw.choice(targets)]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how["signal"])
    return bool(targets)


def newest_step(folder):
    return max((int(path.name[5:13]) for path in folder.glob("step_*.safetensors")), default=0)


def plan_of(draw, most_ranks):
    ranks = draw.randint(1, most_ranks)
    flags = f"-z {draw.randint(0, 3)} -K {draw.choice(['0', 'unit', '0.01'])} -O {draw.randint(0, 1)}"
    how = {"moment": draw.choice(["save", "any"]), "whom": draw.choice(["one", "all"]),
           "signal": draw.choice([signal.SIGKILL] * 4 + [signal.SIGTERM]).value}
    return ranks, flags, draw.choice(["mpi", "fs"]) if launch.mpirun() else "fs", how


def run_disturbed(program, base, folder, arguments, draw):
    """Attempts until so many kills have hit; then one that is left alone. Returns (kills, hangs, last step)."""
    kills = hangs = number = 0
    while kills < arguments.kills:
        number += 1
        ranks, flags, start, how = plan_of(draw, arguments.ranks)
        meeting = folder / f"ranks{number}" if start == "fs" else None
        before = newest_step(folder / "run")
        command = [program, *shlex.split(f"{base} {flags} -x 1000000 -n 1 -nk 3 -y 1"), "-o", str(folder / "run")]
        attempt = Attempt(command, ranks, meeting, folder)
        hit = disturb(attempt, folder / "run", how, draw)
        ended = attempt.end()
        kills += hit
        hangs += not ended
        after = newest_step(folder / "run")
        print(f"{kills:4}  {ranks} ranks, {start}, {flags}: from step {before} to {after}, "
              f"{'killed' if how['signal'] == 9 else 'told to stop'}: {how['whom']}, "
              f"{'while saving' if how['moment'] == 'save' else 'at any moment'}"
              f"{'' if hit else ' (too late)'}{'' if ended else '; DID NOT END'}", flush=True)
        if after == before and not hit:
            sys.exit(f"chaos: {shlex.join(command)}\n{attempt.text[-2000:]}")
    ranks, flags, _, _ = plan_of(draw, arguments.ranks)
    last = newest_step(folder / "run") + 2
    command = [program, *shlex.split(f"{base} {flags} -x {last} -n 1 -nk 3 -y 1"), "-o", str(folder / "run")]
    attempt = Attempt(command, ranks, folder / "ranks", folder)
    if not attempt.end() or any(process.returncode for process in attempt.processes):
        sys.exit(f"chaos: the last start failed: {shlex.join(command)}\n{attempt.text[-2000:]}")
    return kills, hangs, last


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(one, other, step):
    found = []
    if (one / "main.log").read_bytes() != (other / "main.log").read_bytes():
        found.append("main.log")
    hashes = [json.loads((folder / "summary.json").read_text())["run_hash"] for folder in (one, other)]
    if hashes[0] != hashes[1]:
        found.append(f"run_hash {hashes[0]} and {hashes[1]}")
    name = f"step_{step:08}.safetensors"
    files = [sha256_of(folder / name) for folder in (one, other)]
    if files[0] != files[1]:
        found.append(f"{name}, SHA-256 {files[0][:16]} and {files[1][:16]}")
    return found, hashes[0], files[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--ranks", type=int, default=6, metavar="N", help="at most so many (6)")
    parser.add_argument("--program", default=str(launch.TOP / "train_mlp"), metavar="FILE")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    base = f"{BASE} {draw.choice(KINDS)}"
    if not Path(arguments.program).exists():
        parser.error(f"{arguments.program} is not there: make train_mlp")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: ended by a signal"))
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        folder = Path(name)
        print(f"seed {arguments.seed}: {base}", flush=True)
        kills, hangs, last = run_disturbed(arguments.program, base, folder, arguments, draw)
        alone = [arguments.program, *shlex.split(f"{base} -z 0 -x {last} -n {last}"), "-o", str(folder / "alone")]
        straight = Attempt(alone, 1, folder / "one rank", folder)
        straight.end()
        if straight.processes[0].returncode:
            sys.exit(f"chaos: {shlex.join(alone)}\n{straight.text[-2000:]}")
        found, run_hash, file = differences(folder / "run", folder / "alone", last)
        lines = len(re.findall(r"^s:", (folder / "run/main.log").read_text(), re.M))
    print(f"{kills} kills, {hangs} hung, {last} steps ({lines} lines), run hash {run_hash}, SHA-256 {file[:16]}: "
          f"{', '.join(found) + ' differ' if found else '0 differences'}")
    return 1 if found or hangs or lines != last else 0


if __name__ == "__main__":
    sys.exit(main())
