"""Rows of results, and programs that are built and run under a time limit (dev/gpu_check.py).

    check = Check(dry, budget)        # dry: for the CPU build
    prepare(check)                    # libraries and GoogleTest that the linker does not find by itself
    check.build(["train_mlp"])
    check.row("recipe", "2 ranks", check.train("z1", 2, "-z", "1")[0].verdict)
"""

import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parent.parent
WORK = Path("build/gpu_check")   # programs are started in TOP, so that paths stay short
PASSED, FAILED, NO_TIME, LEFT_OUT = "passed", "FAILED", "did not fit", "left out"

# What the compiler or the linker misses, and what helps.
ADVICE = {
    "xxhash.h": "run dev/deps.sh where there is a network, and bring build/headers along",
    "nlohmann/json.hpp": "run dev/deps.sh where there is a network, and bring build/headers along",
    "gtest/gtest.h": "see build/gtest in dev/gpu_check.py --help",
    "nccl.h": "set NCCL_HOME to a folder with include/ and lib/ of NCCL",
    "-lnccl": "set NCCL_HOME to a folder with include/ and lib/ of NCCL",
}


class Outcome(NamedTuple):
    verdict: str
    text: str   # what was printed; of what did not fit or was left out, why


def missing(log):
    """Of a compiler's messages: what it did not find and what to do about it; "" if that was not the trouble."""
    found = re.search(r"fatal error: (\S+): No such file|cannot find (-l\w+)|cannot open source file \"(\S+)\"", log)
    if not found:
        return ""
    name = next(filter(None, found.groups()))
    return f"{name} is missing: {ADVICE.get(name, 'install it')}"


class Check:
    """Rows, and processes under a time limit. `build` and `run` may be called from several threads."""

    def __init__(self, dry, budget):
        self.dry = dry
        self.start = time.monotonic()
        self.deadline = self.start + budget
        self.cores = len(os.sched_getaffinity(0))
        self.counts = dict.fromkeys((PASSED, FAILED, NO_TIME, LEFT_OUT), 0)
        self.lock = threading.Lock()
        self.builders = ThreadPoolExecutor(self.cores)
        self.built = {}   # target: future of its Outcome
        shutil.rmtree(WORK / "logs", ignore_errors=True)
        (WORK / "logs").mkdir(parents=True)
        (WORK / "results.txt").unlink(missing_ok=True)
        self.environment = {**os.environ, "DEVICE": "cpu" if dry else "cuda"}
        for number in (signal.SIGINT, signal.SIGTERM):   # what is not done then does not fit
            signal.signal(number, lambda *_: setattr(self, "deadline", 0.0))

    # ---- rows

    def say(self, line):
        with self.lock:
            print(line, flush=True)
            with open(WORK / "results.txt", "a") as file:
                print(line, file=file)

    def row(self, part, case, verdict, text=""):
        """A verdict of "" is for numbers that are neither good nor bad."""
        if verdict:
            self.counts[verdict] += 1
        self.say(f"{part:<13} {case:<42} {verdict:<11} {text}".rstrip())

    def side_by_side(self, jobs):
        """Each job is a function that returns what row() takes, which is written as soon as it is there."""
        with ThreadPoolExecutor(self.cores) as pool:
            for done in as_completed([pool.submit(job) for job in jobs]):
                self.row(*done.result())

    def close(self):
        """The last line, and what main() returns."""
        self.builders.shutdown()
        told = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        self.say(f"gpu_check: {told}; {time.monotonic() - self.start:.0f} s")
        return 1 if self.counts[FAILED] else 3 if self.counts[NO_TIME] + self.counts[LEFT_OUT] else 0

    # ---- processes

    def run(self, name, limit, commands, environments=None):
        """Runs the commands at the same time, each with its output in build/gpu_check/logs, for at most `limit` seconds
        and never past the deadline. The text is the first one's output, or that of one that failed."""
        start = time.monotonic()
        if self.deadline - start < 1:
            return Outcome(NO_TIME, "")
        end = start + limit
        logs = [WORK / "logs" / f"{name}.{i}.log" for i in range(len(commands))]
        processes = []
        for log, command, environment in zip(logs, commands, environments or [{}] * len(commands)):
            with open(log, "w") as out:
                process = subprocess.Popen([str(word) for word in command], cwd=TOP, stdin=subprocess.DEVNULL, stdout=out,
                                           stderr=out, env={**self.environment, **environment}, start_new_session=True)
            processes.append(process)
        while any(process.poll() is None for process in processes) and time.monotonic() < min(end, self.deadline):
            if any(process.poll() for process in processes):   # its peers may wait for it for ever
                end = min(end, time.monotonic() + 5)
            time.sleep(0.05)
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [log.read_text(errors="replace") for log in logs]
        for process, command, text in zip(processes, commands, texts):
            if process.returncode and process not in running:
                last = "".join(f"\n    | {line}" for line in text.splitlines()[-12:])
                self.say(f"    {shlex.join(map(str, command))}: exit code {process.returncode}{last}")
                return Outcome(FAILED, text)
        return Outcome(NO_TIME, f"no end after {time.monotonic() - start:.0f} s") if running else Outcome(PASSED, texts[0])

    def build(self, targets):
        """Starts to build targets of the Makefile, each in a process of its own."""
        def make(target):
            outcome = self.run("build-" + target.replace("/", "-"), 300, [["make", target]])
            reason = missing(outcome.text) if outcome.verdict == FAILED else ""
            return Outcome(LEFT_OUT, reason) if reason else outcome
        self.run("build-flags", 60, [["make", "build/flags"]])   # the same file for all
        self.built = {target: self.builders.submit(make, target) for target in targets}

    def unbuilt(self, target):
        """None if the target could be built, else what its rows say: verdict and reason."""
        outcome = self.built[target].result()
        if outcome.verdict == PASSED:
            return None
        return outcome.verdict, outcome.text if outcome.verdict == LEFT_OUT else f"{target} was not built"

    def wait_for_builds(self):
        for future in self.built.values():
            future.result()

    # ---- ranks

    def ranks(self, name, limit, count, command, variables=None):
        """The command on ranks that share the GPU: NCCL wants a host name of its own for each, and the loopback."""
        folder = WORK / "ranks" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        commands = [[*command, "-pi", "fs", "-pf", folder, "-pn", count, "-pr", rank] for rank in range(count)]
        shared = [{"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"} if count > 1 else {} for rank in range(count)]
        return self.run(name, limit, commands, [{**(variables or {}), **own} for own in shared])

    def train(self, name, count, *flags):
        """./train_mlp on ranks: its Outcome, and summary.json if it passed."""
        folder = WORK / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        outcome = self.ranks(name, 40, count, ["./train_mlp", "-o", folder, *flags])
        summary = json.loads((folder / "summary.json").read_text()) if outcome.verdict == PASSED else {}
        return outcome, summary


# ---- what this machine has ---------------------------------------------------------------------------------


def has_gpu():
    listed = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return bool(listed) and "GPU " in listed.stdout


def show_machine(check):
    if check.dry:
        check.say(f"machine: CPU build, {check.cores} cores; memcheck and racecheck without compute-sanitizer")
        return
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.split("\n")[0]
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    check.say(f"machine: {gpu}, nvcc {''.join(re.findall('release ([0-9.]+)', nvcc))}, {check.cores} cores")


def find_library(name):
    """lib*.so.N of a Python package, which has include/ and lib/; None if there is none."""
    pattern = f"nvidia/*/lib/lib{name}.so.[0-9]*"
    found = [file for place in filter(None, sys.path) for file in glob.glob(f"{place}/{pattern}")]
    if not found:
        command = ["find", "-L", "/usr", "/opt", Path.home(), "-path", f"*/{pattern}"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return Path(found[0]) if found else None


def link_library(check, name, header, call):
    """A library that is there as a Python package only has no lib*.so for the linker: NCCL_HOME gets one."""
    home, probe = WORK / "libs", WORK / f"probe_{name}"
    given = os.environ.get("NCCL_HOME")
    probe.with_suffix(".cu").write_text(
        f"#include <{header}>\nint main() {{ void* volatile f = (void*){call}; return !f; }}\n")
    command = ["nvcc", probe.with_suffix(".cu"), f"-l{name}", "-o", probe]
    command += [f"-I{given}/include", f"-L{given}/lib"] if given else []
    if subprocess.run(command, capture_output=True).returncode == 0:
        return
    library = find_library(name)
    if given or not library:
        return   # the programs that need it say so
    (home / "lib").mkdir(parents=True, exist_ok=True)
    (home / "include").mkdir(exist_ok=True)
    for path in (library.parent.parent / "include").glob(header[:4] + "*"):
        link(home / "include" / path.name, path)
    for path in (library.name, f"lib{name}.so"):
        link(home / "lib" / path, library)
    check.environment["NCCL_HOME"] = str(TOP / home)


def link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def build_gtest(check):
    """GoogleTest that came along in build/gtest, where there is none."""
    probe = ["g++", "-x", "c++", "-", "-lgtest_main", "-lgtest", "-pthread", "-o", WORK / "probe_gtest"]
    test = "#include <gtest/gtest.h>\nTEST(A, B) {}\n"
    if subprocess.run(probe, input=test, text=True, capture_output=True).returncode == 0 or not Path("build/gtest").is_dir():
        return
    for name, folder in (("CPATH", TOP / "build/gtest"), ("LIBRARY_PATH", TOP / WORK)):
        check.environment[name] = os.pathsep.join(filter(None, (str(folder), check.environment.get(name))))
    commands = []
    for source, library in (("gtest-all", "gtest"), ("gtest_main", "gtest_main")):
        compiled = WORK / f"{source}.o"
        commands.append(f"g++ -O1 -c build/gtest/src/{source}.cc -o {compiled} && "
                        f"ar rcs {WORK}/lib{library}.a {compiled}")
    check.run("build-gtest", 120, [["sh", "-c", command] for command in commands])


def prepare(check):
    """Libraries and GoogleTest that the linker does not find by itself. Tells what machine this is."""
    shutil.rmtree(WORK / "libs", ignore_errors=True)
    jobs = [lambda: build_gtest(check)]
    if not check.dry:
        check.environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (
            check.environment.get("LD_LIBRARY_PATH"), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64")))
        libraries = [("nccl", "nccl.h", "ncclGetVersion"), ("cublasLt", "cublasLt.h", "cublasLtGetVersion"),
                     ("cublas", "cublas_v2.h", "cublasGetCudartVersion")]
        jobs += [lambda library=library: link_library(check, *library) for library in libraries]
    show_machine(check)
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
