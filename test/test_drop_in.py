"""Truly drop-in: what llmc_zero/ promises to a framework that takes the headers in.

Each header alone, first in its file, twice, in two translation units of one program, warnings as errors; the
host-only ones as C99 and C++ too; guards and names; nothing that exits, prints or keeps state; beside a file
that has defined llm.c's names before; without nccl.h for one rank. With dev/cpu/nvcc. The real nvcc compiles
every header in `make cuda-check`; here, where it is on PATH, the umbrella and the clash of names.
"""

import re
import shutil
import subprocess

import pytest

from conftest import LONG, TOP, slow

FOLDER = TOP / "llmc_zero"
HEADERS = sorted(path.name for path in FOLDER.glob("*.cuh"))
HOST_ONLY = ["check.cuh", "layout.cuh", "schedule.cuh", "memory.cuh", "numbers.cuh", "call_order.cuh"]   # need no CUDA
# JSON takes a compiler many seconds; `make cuda-check` compiles each of these alone, first and twice, too
WITH_JSON = ["checkpoint.cuh", "checkpoint_parts.cuh", "checkpoint_grid.cuh", "checkpoint_temporary.cuh",
             "checkpoint_save.cuh", "checkpoint_check.cuh", "checkpoint_load.cuh", "checkpoint_folder.cuh",
             "safetensors.cuh"]
IN_OTHERS = ["timeline.cuh", "collectives.cuh", "slots.cuh", "elements.cuh", "exact_sum.cuh",
             "grad_norm.cuh", "reduce.cuh", "adamw.cuh",
             "optimizer_setup.cuh", "optimizer_params.cuh", "optimizer_grads.cuh", "optimizer.cuh",
             "optimizer_drop.cuh"]   # and so do these
LIBRARY = [name for name in HEADERS if name != "world.cuh"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
CPU_NVCC = [str(TOP / "dev/cpu/nvcc"), "-std=c++17", "-O0", "-Xcompiler", ",".join(WARNINGS)]
REAL_NVCC = ["nvcc", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-Xcompiler", ",".join(WARNINGS)]
NVCCS = [pytest.param(CPU_NVCC, id="cpu"),
         pytest.param(REAL_NVCC, id="cuda",
                      marks=pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc"))]
WORDS = r"(?:zero_|Zero|ZERO_|LLMC_ZERO_)"


def build(command, tmp_path, check=True):
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    if check:
        assert result.returncode == 0, " ".join(command) + "\n" + result.stderr[-3000:]
    return result


def write_pair(tmp_path, header, suffix=".cu"):
    """Two files that each include the header twice before anything else; the first has main."""
    include = f'#include "llmc_zero/{header}"\n' * 2
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    first.write_text(include + "int second(void);\nint main(void) { return second(); }\n")
    second.write_text(include + "int second(void);\nint second(void) { return 0; }\n")
    return [str(first), str(second)]


def code_of(name):
    """A header without comments, string contents and preprocessor lines."""
    text = (FOLDER / name).read_text()
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "' '", text)
    return text


def without_directives(text):
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)


def file_scope(text):
    """The text at file scope: everything inside braces (and the parameters of functions) taken out."""
    text = without_directives(text)
    text = re.sub(r'extern\s*""\s*\{', "", text)
    while True:
        shorter = re.sub(r"\{[^{}]*\}", "@", text)
        if shorter == text:
            return text
        text = shorter


# ---- compiling --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("header", [pytest.param(header, marks=slow) if header in WITH_JSON + IN_OTHERS else header
                                    for header in HEADERS])
def test_alone_first_twice_in_two_units(header, tmp_path):
    program = tmp_path / "program"
    files = write_pair(tmp_path, header)
    build(CPU_NVCC + ["-I", str(TOP)] + files + ["-lnccl", "-o", str(program)], tmp_path)
    assert subprocess.run([program], timeout=LONG).returncode == 0


@pytest.mark.parametrize("header", HOST_ONLY)
@pytest.mark.parametrize("language", ["c", "c++"])
def test_host_only_headers_need_no_cuda(header, language, tmp_path):
    compiler = ["gcc", "-std=c99"] if language == "c" else ["g++", "-std=c++11"]
    files = write_pair(tmp_path, header)
    strict = WARNINGS + ["-pedantic", "-I", str(TOP), "-x", language]
    build(compiler + strict + files + ["-o", "program"], tmp_path)
    listed = build(compiler + ["-I", str(TOP), "-M", "-x", language, files[0]], tmp_path).stdout
    assert not re.search(r"cuda|nccl|mpi", listed.replace(str(TOP), "").replace(str(tmp_path), "")), listed


@pytest.mark.parametrize("nvcc", NVCCS[:1])   # `make cuda-check` does the same with the real nvcc
def test_without_nccl(nvcc, tmp_path):
    """ZERO_NO_NCCL: nccl.h is not looked for (it would be an error here), a program for one rank links."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "nccl.h").write_text("#error nccl.h was included\n")
    files = write_pair(tmp_path, "llmc_zero.cuh")
    options = ["-I", str(TOP), "-I", str(trap)]
    build(nvcc + ["-DZERO_NO_NCCL"] + options + files + ["-o", "program"], tmp_path)
    refused = build(nvcc + options + ["-c", files[0], "-o", "first.o"], tmp_path, check=False)
    assert "nccl.h was included" in refused.stderr                     # the trap works


# Names of llm.c and of other trainers, as macros, types and functions, before our umbrella comes.
FOREIGN = r"""
#include <assert.h>
#include <stdio.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#define LLMC_ZERO_CUH
#define CEIL_DIV(M, N) (((M) + (N) - 1) / (N))
#define WARP_SIZE 32U
#define ENABLE_BF16
#define cudaCheck(err) (cudaCheck_(err, __FILE__, __LINE__))
#define ncclCheck(err) (void)(err)
#define fopenCheck(path, mode) fopen(path, mode)
#define NUM_PARAMETER_TENSORS 16
#define LN_FACTOR 3
#define CHECK(x) x
#define ALIGN 16
#define BLOCK 256
#define ERROR 1
#define OK 0
inline void cudaCheck_(cudaError_t error, const char* file, int line) { (void)error; (void)file; (void)line; }
typedef __nv_bfloat16 floatX;
struct ShardInfo { size_t offset; size_t size; };
struct MultiGpuConfig { int process_rank, num_processes, zero_stage; };
enum class DType { FP32, FP16, BF16 };
template <class T> struct Packed128 { T payload[16 / sizeof(T)]; };
typedef Packed128<float> f128;
typedef Packed128<floatX> x128;
__device__ inline float lerp(float a, float b, float weight) { return fmaf(weight, b, fmaf(-weight, a, a)); }
template <typename T> __device__ T warpReduceSum(T x) { return x; }
inline void printf0(const char* format) { (void)format; }
inline int check(int x) { return x; }
inline int layout(int x) { return x; }
inline int memory(int x) { return x; }
cudaStream_t main_stream;
cudaDeviceProp deviceProp;
MultiGpuConfig multi_gpu_config;
#include "llmc_zero/llmc_zero.cuh"
int main() {
    cudaCheck(cudaSuccess);
    ShardInfo shard = {0, CEIL_DIV(5, 2)};
    ZeroOptimizer z = {};
    zero_free(&z);
    printf0("");
    return shard.size == 3 && LLMC_ZERO_VERSION > 0 && zero_ok().code == ZERO_OK ? 0 : 1;
}
"""


@pytest.mark.parametrize("nvcc", NVCCS)
def test_beside_the_names_of_llm_c(nvcc, tmp_path):
    source = tmp_path / "trainer.cu"
    source.write_text(FOREIGN)
    flags = ["--use_fast_math", "-I", str(TOP), str(source), "-lnccl", "-o", str(tmp_path / "trainer")]
    build(nvcc + flags, tmp_path)
    if nvcc is CPU_NVCC:
        assert subprocess.run([tmp_path / "trainer"], timeout=LONG).returncode == 0


# ---- reading ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("header", HEADERS)
def test_guard(header):
    text = code_of(header)
    guard = re.match(r"\s*#ifndef (\w+)\n#define (\w+)\n", text)
    assert guard and guard[1] == guard[2]
    assert guard[1] == f"LLMC_ZERO_{header[:-4].upper()}_CUH_INCLUDED"
    assert text.rstrip().endswith("#endif")


@pytest.mark.parametrize("header", HEADERS)
def test_macros_have_the_prefix(header):
    for name in re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", code_of(header), flags=re.M):
        assert re.match(r"(?:LLMC_)?ZERO_[A-Z]|XXH_INLINE_ALL$", name), name     # the latter is xxHash's switch


@pytest.mark.parametrize("header", HEADERS)
def test_names_at_file_scope_have_the_prefix(header):
    """Functions, types, enumerators and typedefs."""
    text = without_directives(code_of(header))
    names = re.findall(r"\b(?:struct|union|enum|class)\s+(\w+)\s*(?:\{|;)", text)
    for body in re.findall(r"\benum\b[^{;]*\{([^}]*)\}", text):
        names += re.findall(r"(?:^|,)\s*(\w+)", body)
    names += re.findall(r"\}\s*(\w+)\s*;", text)
    outer = file_scope(text)
    names += re.findall(r"\btypedef\b[^@;]*?\b(\w+)\s*;", outer)
    names += re.findall(r"\b(\w+)\s*\([^()@;]*(?:\([^()]*\)[^()@;]*)*\)\s*@", outer)
    # A local array of a nameless struct; and NCCL's own handle, declared as nccl.h does.
    known = {"ranges", "ncclComm_t"}
    wrong = [name for name in names if not re.match(WORDS, name) and name not in known]
    assert not wrong
    assert names or header in ("llmc_zero.cuh", "checkpoint.cuh")


@pytest.mark.parametrize("header", HEADERS)
def test_no_state_at_file_scope(header):
    """What is left at file scope, with functions, types and templates taken out, is no variable."""
    outer = file_scope(code_of(header))
    for statement in re.split(r"[;@]", outer):
        statement = " ".join(statement.split())
        if re.search(r"\b(?:typedef|const|constexpr|struct|enum|union|using)\b|^$|\(|^\w+$", statement):
            continue
        pytest.fail(f"{header}: a variable at file scope? {statement}")
    assert not re.search(r"\bstatic\s+(?!inline|__|const)\w+\s+\w+\s*(?:=|;)", code_of(header))


@pytest.mark.parametrize("header", HEADERS)
def test_never_exits_prints_or_asserts(header):
    calls = r"(?<![\w.])(?:_?exit|quick_exit|abort|v?f?printf|f?puts|putchar|perror|assert)\s*\("
    assert not re.findall(calls + r"|std::c(?:out|err)", code_of(header))


@pytest.mark.parametrize("header", LIBRARY)
def test_no_mpi_outside_world(header):
    assert not re.search(r"MPI_|mpi\.h|sys/socket", code_of(header))


@pytest.mark.parametrize("header", HEADERS)
def test_every_kernel_is_a_template(header):
    """So that a header in two translation units of one program is one kernel each, never two of one name."""
    for found in re.finditer(r"^(.*)\n?static __global__[^{;]*", code_of(header), flags=re.M):
        assert "template" in found[1] or "template" in found[0], found[0]
    assert "__global__" not in re.sub(r"static __global__", "", code_of(header))


@pytest.mark.parametrize("header", HEADERS)
def test_defines_list_names_what_is_there(header):
    """The manual's `defines:` list, by which people find things, names nothing that is not in the file."""
    text = (FOLDER / header).read_text()
    manual = re.match(r"/\*.*?\*/", text, flags=re.S)[0]
    listed = re.search(r"defines:(.*)\*/", manual, flags=re.S)
    assert listed, "no defines: list"
    for name in re.findall(rf"\b({WORDS}\w+)\b(?!\*)", re.sub(r"\([^)]*\)", "", listed[1])):
        if name.endswith("_"):
            continue
        assert re.search(rf"\b{name}\b", text[len(manual):]) or re.search(r"check\w*\.cuh", listed[1]), name
