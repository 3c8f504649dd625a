"""Every call of CUDA, NCCL and cuBLASLt that train_mlp makes fails once, on one of two ranks, in a run that resumes from a
checkpoint and saves others: both ranks end by themselves, and the error names the call.

The n-th call of a name is failed for some n; RUN_ALL=1 takes many more. `pytest -s` prints how many failed.
"""

import os
import re
import shutil

import pytest
from conftest import TOP, end, start

MODEL = "-L 2 -C 64 -b 4 -d 16 -K unit -G 1 -H 2 -n 1"
WAYS = ["-z 1", "-z 3", "-z 0 -R ordered"]
# What frees or asks in passing: a run does not fail for it.
QUIET = {"cudaEventDestroy", "cudaFree", "cudaFreeHost", "cudaStreamDestroy", "ncclCommAbort", "ncclCommDestroy",
         "cublasLtDestroy", "cublasLtMatmulDescDestroy", "cublasLtMatmulPreferenceDestroy", "cublasLtMatrixLayoutDestroy"}


def names():
    """What the program's sources call and the CPU build can fail."""
    sources = [TOP / "train_mlp.cu", *(TOP / "llmc_zero").glob("*.cuh"), *(TOP / "dev/mlp").iterdir()]
    called = {name for path in sources
              for name in re.findall(r"\b((?:cuda|nccl|cublasLt)[A-Z]\w+)\(", path.read_text())}
    known = "".join(path.read_text() for path in (TOP / "dev/cpu").glob("*.cpp"))
    return sorted(name for name in called if f'"{name}"' in known)


def counts(place):
    """Which calls of a name to fail, the first one first."""
    if os.environ.get("RUN_ALL") != "1":
        return [(1,), (4, 1), (1, 2)][place]
    n, numbers = 1, []
    while n < 5000:
        numbers.append(n)
        n += 1 if n < 12 else n // 4
    return numbers


def run_ranks(tmp_path, flags, env=((), ())):
    """A run of two ranks that meet in a folder: exit codes, and all errors."""
    meet = tmp_path / "meet"
    shutil.rmtree(meet, ignore_errors=True)
    meet.mkdir()
    ranks = [start(["./train_mlp", *MODEL.split(), *flags.split(), "-pi", "fs", "-pf", meet, "-pn", 2, "-pr", rank],
                   env=dict(env[rank])) for rank in range(2)]
    ends = [end(rank) for rank in ranks]
    return [rank.returncode for rank in ranks], ends[0][1] + ends[1][1]


@pytest.mark.parametrize("place", range(len(WAYS)), ids=WAYS)
def test_every_call_fails_once(place, tmp_path):
    if "dev/cpu/nvcc" not in (TOP / "build/flags").read_text():
        pytest.skip("needs CUDA_CPU_FAIL of the CPU build")
    before, folder, failed, quiet = tmp_path / "before", tmp_path / "run", {}, 0
    codes, text = run_ranks(tmp_path, f"{WAYS[place]} -x 1 -o {before}")
    assert codes == [0, 0], text
    for name in names():
        for n in counts(place):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(before, folder)
            env = [{}, {}]
            env[n % 2]["CUDA_CPU_FAIL"] = f"{name}:{n}"
            if name == "ncclCommInitRank":      # the other rank is in there, and hears of it from NCCL's limit alone
                env[1 - n % 2]["CUDA_CPU_TIMEOUT"] = "3"
            codes, text = run_ranks(tmp_path, f"{WAYS[place]} -x 3 -y 1 -o {folder}", env)
            if codes == [0, 0]:
                quiet += name in QUIET and n == 1
                if n > 4:
                    break                       # there are not so many calls
                continue
            failed[name] = failed.get(name, 0) + 1
            assert 0 not in codes, f"{name}:{n}: {codes} {text}"
            assert name in text, f"{name}:{n} is not named: {text}"
    print(f"\n{WAYS[place]}: {sum(failed.values())} failures of {len(failed)} calls; {quiet} more do not end a run")
    assert len(failed) >= (20 if place != 1 else 10), failed
