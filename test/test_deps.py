"""dev/deps.sh and dev/probe.sh: a part that does not do what we use of it is found, whatever its headers are named."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import TOP, run
import launch

PARTS = "compiler mpi blas gtest xxhash json cuda nccl".split()


def script(path, text):
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)
    return path


class Machine:
    """A compiler that searches `folder` before all else and notes its calls in `calls`."""

    def __init__(self, tmp_path, more=""):
        self.folder, self.calls = tmp_path / "front", tmp_path / "calls"
        self.folder.mkdir()
        self.notes = tmp_path / "notes"
        self.compiler = script(tmp_path / "c++", f'echo "$*" >>{self.calls}\n'
                               f'exec {os.environ.get("CXX", "g++")} -I{self.folder} -L{self.folder} "$@" {more}\n')

    def works(self, part, device="cpu", before="", env=None):
        """(whether the part works, what the probe said)"""
        self.calls.write_text("")
        result = run(["bash", "-euo", "pipefail", "-c",
                      f"device={device}; . dev/probe.sh; notes={self.notes}; {before}\nlook_around; works {part}"],
                     env={"CXX": self.compiler, "DEVICE": device, **(env or {})}, timeout=300, check=False)
        assert result.out == result.err == ""
        log = self.notes / f"{part}.log"
        return result.code == 0, log.read_text() if log.exists() else ""

    def compiled(self):
        return "dev/probes/" in self.calls.read_text()

    def put(self, files):
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".a"):
                subprocess.run(["ar", "rcs", path], check=True)
            elif name.endswith(".so"):
                subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", path], check=True)
            else:
                path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


NETLIB = """#pragma once
enum CBLAS_ORDER { CblasColMajor = 102 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };
extern "C" void cblas_sgemm(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE, int, int, int, float, const float*, int,
                            const float*, int, float, float*, int);
"""
OLD_NCCL = """#include <cuda_runtime.h>
typedef struct ncclComm* ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError } ncclResult_t;
extern "C" ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int);
"""
BROKEN = {
    "another BLAS": ("blas", {"cblas.h": NETLIB}, "openblas_set_num_threads"),
    "OpenBLAS without its library": ("blas", {"libopenblas.so": ""}, "undefined reference"),
    "GoogleTest without its library": ("gtest", {"libgtest.a": "", "libgtest_main.a": ""}, "undefined reference"),
    "GoogleTest without its headers": ("gtest", {"gtest/gtest.h": ""}, "gtest.cpp"),
    "xxHash without XXH3": ("xxhash", {"xxhash.h": "#define XXH_VERSION_NUMBER 605\n"}, "XXH3"),
    "xxHash with other values": ("xxhash", {"xxhash.h": "#include_next <xxhash.h>\n#undef XXH_VERSION_NUMBER\n"
                                            "#define XXH_VERSION_NUMBER 704\n"}, "0.8 or later"),
    "JSON without sax_parse": ("json", {"nlohmann/json.hpp": "namespace nlohmann { struct json {}; }\n"}, "sax_parse"),
    "a part of CUDA": ("cuda", {"cublasLt.h": "#include <cublas_api_of_another_package.h>\n"}, "another_package"),
    "CUDA 11": ("cuda", {"cuda_runtime.h": "#include_next <cuda_runtime.h>\n#undef CUDART_VERSION\n"
                         "#define CUDART_VERSION 11080\n"}, "CUDA 12"),
    "an old NCCL": ("nccl", {"nccl.h": OLD_NCCL}, "ncclGetLastError"),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_here_works_and_is_asked_once(machine, part):
    assert machine.works(part)[0] and machine.compiled()
    assert machine.works(part)[0] and not machine.compiled()


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_parts_are_found(machine, kind):
    part, files, said = BROKEN[kind]
    machine.put(files)
    for _ in range(2):   # a no is not kept
        works, log = machine.works(part)
        assert not works and said in log


def test_a_compiler_without_cpp17(tmp_path):
    assert not Machine(tmp_path, "-std=c++11").works("compiler")[0]


@pytest.mark.parametrize("kind", ["xxHash without XXH3", "JSON without sax_parse", "OpenBLAS without its library"])
def test_what_comes_before_is_noticed(machine, kind):
    part, files, _ = BROKEN[kind]
    for name in files:   # as an empty folder, it is searched from the start
        (machine.folder / name).parent.mkdir(exist_ok=True)
    assert machine.works(part)[0]
    machine.put(files)
    assert not machine.works(part)[0]
    for name in files:
        (machine.folder / name).unlink()
    assert machine.works(part)[0]


@pytest.mark.parametrize("mpicc, mpirun, said", [
    ("echo -I/nonexistent", None, "mpi.h"),
    ("echo 'unknown option -showme' >&2; exit 1", None, "mpi.h"),
    (None, "", "no mpirun"),
    (None, "exit 1", ""),
    (None, 'while [[ $1 != */mpi.program ]]; do shift; done; "$@" && "$@"', "")],   # of another MPI: each rank alone
    ids=["no headers", "no Open MPI", "no mpirun", "mpirun fails", "another mpirun"])
def test_mpi(machine, tmp_path, mpicc, mpirun, said):
    for name, text in (("mpicc", mpicc), ("mpirun", mpirun)):
        script(tmp_path / name, text or f'exec "{launch.mpi_tool(name)}" "$@"\n')
    before = f"mpi_tool() {{ echo {tmp_path}/$1; }}\nstart_mpi() {{ {tmp_path}/mpirun -np 2 \"$@\"; }}\n"
    if mpirun == "":
        before += f"mpi_tool() {{ [[ $1 == mpirun ]] || echo {tmp_path}/$1; }}\n"
    works, log = machine.works("mpi", before=before)
    assert not works and said in log


def test_cpath_hides_nothing_of_the_cpu_build(machine, tmp_path):
    bad = tmp_path / "cpath"
    bad.mkdir()
    for name in ("cuda_runtime.h", "nccl.h", "cublasLt.h", "xxhash.h"):
        (bad / name).write_text(f"#error {name} of CPATH\n")
    for part in ("cuda", "nccl", "xxhash"):
        assert machine.works(part, env={"CPATH": bad})[0]
    source = tmp_path / "a.cu"
    source.write_text("#include <nccl.h>\n__global__ void kernel(int* a) { *a = threadIdx.x; }\n")
    run(["dev/cpu/nvcc", "-c", source, "-o", tmp_path / "a.o"], env={"CPATH": bad})


def test_checkpoints_refuse_an_old_xxhash(machine):
    machine.put(BROKEN["xxHash with other values"][1])
    result = run([machine.compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "llmc_zero/safetensors.cuh"], check=False)
    assert result.code != 0 and "xxHash 0.8 or later is needed" in result.err


def test_openblas_of_venv_comes_first(tmp_path):
    (tmp_path / ".venv/openblas/include").mkdir(parents=True)
    (tmp_path / ".venv/openblas/include/cblas.h").write_text("")
    (tmp_path / "cpath").mkdir()
    out = run(["bash", "-c", f'. dev/cpu/paths.sh; cpu_paths {tmp_path}; echo "${{includes[*]}}"; echo "${{blas[*]}}"'],
              env={"CPATH": tmp_path / "cpath"}).out
    includes, blas = (line.split() for line in out.splitlines())
    places = [includes.index(str(tmp_path / name)) for name in (".venv/openblas/include", "cpath")]
    assert places[0] < places[1] == len(includes) - 1
    assert not any("/usr/include" in place for place in includes)
    assert blas.index(f"-L{tmp_path}/.venv/openblas/lib") < blas.index("-lopenblas")


def test_probes_use_what_the_sources_use():
    def names(pattern, *files):
        text = "\n".join(path.read_text() for name in files for path in sorted(TOP.glob(name)))
        return set(re.findall(pattern, re.sub(r"/\*[\s\S]*?\*/|//.*", "", text)))

    for part, pattern, files in (("nccl", r"\b(nccl[A-Z]\w+)\(", ["llmc_zero/*.cuh"]),
                                 ("mpi", r"\bMPI_\w+", ["llmc_zero/world.cuh"]),
                                 ("xxhash", r"\bXXH3_\w+", ["llmc_zero/*.cuh"]),
                                 ("blas", r"\b(?:cblas|openblas)_\w+", ["dev/cpu/*.cpp"])):
        used = names(pattern, *files)
        assert used and used <= names(pattern.replace(r"\(", ""), f"dev/probes/{part}.cpp"), part


# ---- the whole of deps.sh, in a copy where installing is only noted


@pytest.fixture
def copy(machine, tmp_path):
    """A copy of the project that has its Python packages; apt-get and pip note what they are asked for."""
    machine.top = tmp_path / "copy"
    shutil.copytree(TOP / "dev", machine.top / "dev", ignore=shutil.ignore_patterns("__pycache__"))
    venv = machine.top / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("cuda-headers", "openblas", "include"):   # what this machine's own parts may rest on
        if (TOP / ".venv" / name).exists():
            (venv / name).symlink_to(TOP / ".venv" / name)
    python = script(venv / "bin/python", f'if [[ ${{2:-}} == pip ]]; then echo "pip $*" >>{tmp_path}/asked; exit 1; fi\n'
                    f'exec {sys.executable} "$@"\n')
    (venv / ".made").write_text(f"{machine.top} {sys.version_info[0]} {sys.version_info[1]}\n")
    shutil.copy(TOP / ".venv/.packages", venv)
    tools = tmp_path / "tools"
    tools.mkdir()
    script(tools / "apt-get", f'echo "apt-get $*" >>{tmp_path}/asked\n'
           f'[[ -e {tmp_path}/apt-mends && "$*" == *" install "* ]] && rm -r {machine.folder}/*\nexit 0\n')
    script(tools / "sudo", 'shift\nexec "$@"\n')
    shutil.copy(python, tools / "own-python")
    script(tools / "python3", f'[[ "$*" == "-m venv "* ]] || exec {sys.executable} "$@"\n'
           f'mkdir -p "$3/bin" && cp {tools}/own-python "$3/bin/python"\n')

    def deps(*words):
        machine.calls.write_text("")
        return run([machine.top / "dev/deps.sh", *words], cwd=machine.top, check=False, timeout=600,
                   env={"CXX": machine.compiler, "DEVICE": "cpu", "PATH": f"{tools}:{os.environ['PATH']}"})

    machine.deps, machine.asked, machine.apt_mends = deps, tmp_path / "asked", tmp_path / "apt-mends"
    return machine


def test_deps_mends_with_a_package(copy):
    copy.put(BROKEN["another BLAS"][1])
    copy.apt_mends.touch()
    first = copy.deps("demo")
    assert first.code == 0, first.err
    assert first.out == "deps: apt-get install libopenblas-dev\n" and first.err == ""
    assert "install -y --no-install-recommends libopenblas-dev" in copy.asked.read_text()
    second = copy.deps("demo")
    assert (second.code, second.out, second.err) == (0, "", "") and not copy.compiled()
    # and what it leaves does for a machine that has neither header
    headers = copy.top / "build/headers"
    alone = subprocess.run(["g++", "-std=c++17", "-H", "-fsyntax-only", f"-I{headers}", "-x", "c++", "-"],
                           input="#include <xxhash.h>\n#include <nlohmann/json.hpp>\n", text=True, capture_output=True)
    assert alone.returncode == 0, alone.stderr
    assert not re.search(r"^\.+ /(?!.*build/headers/).*(xxh|nlohmann)", alone.stderr, re.M)


@pytest.mark.parametrize("kind", ["another BLAS", "GoogleTest without its library", "JSON without sax_parse"])
def test_deps_names_what_it_cannot_mend(copy, kind):
    part, files, reason = BROKEN[kind]
    copy.put(files)
    result = copy.deps("test")
    assert result.code == 1
    assert f"deps: missing: {part} (as root: apt-get install lib" in result.err.replace("nlohmann", "lib")
    assert reason in result.err
    assert " install " in copy.asked.read_text()          # both were tried
    assert ("pip " in copy.asked.read_text()) == (part != "gtest")


def test_deps_fetches_the_headers_of_an_old_nccl(copy):
    copy.put(BROKEN["an old NCCL"][1])
    result = copy.deps("demo")
    assert result.code != 0 and "deps: headers of nccl from PyPI" in result.out
    assert "nvidia-nccl" in copy.asked.read_text() and "cublas" not in copy.asked.read_text()


def test_a_moved_checkout_gets_a_new_environment(copy):
    (copy.top / ".venv/.made").write_text("/elsewhere 3 11\n")
    result = copy.deps("demo")
    assert "deps: python3 -m venv .venv\ndeps: pip install numpy" in result.out
    assert (copy.top / ".venv/.made").read_text().startswith(f"{copy.top} ")
