"""Third-party CUDA sources through dev/cpu/nvcc: launch syntax, dynamic shared memory (dev/cpu/rewrite.py).

A program of our own with every form of launch that we know of, checked element by element; messages that
name the original line; dependencies; sources that need no rewriting. With LLMC_DIR=a checkout of llm.c: its
trainer, as it is, on a tiny model in FP32 and BF16, at 1 and 2 ranks.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LONG, TOP, run

sys.path[:0] = [str(TOP / "dev/llmc"), str(TOP / "dev/cpu")]
import launch
import make_files
import rewrite

NVCC = str(TOP / "dev/cpu/nvcc")
WARNINGS = ["-Xcompiler", "-Wall,-Wextra,-Werror"]

PROGRAM = r'''
#include <stdio.h>
#include <string.h>
#include "kernels.cuh" // add<<<1, 1>>>(nothing) in a comment is none
#define LAUNCH(kernel, n, ...) \
    kernel<<<((n) + 31) / 32, 32, 0, stream>>>(__VA_ARGS__, \
                                               n)
#define NOTHING NULL
#define BLOCKS <<<4, 32>>>

static int failures = 0;
static float host[128];

static void expect(int line, const float* device, float first, float step) {
    cudaError_t error = cudaGetLastError();
    cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 128; i++)
        if (error != cudaSuccess || host[i] != first + step * (float)i) {
            printf("line %d: %s, element %d is %g\n", line, cudaGetErrorString(error), i, (double)host[i]);
            failures++;
            break;
        }
    cudaMemset((void*)device, 0xff, sizeof host);
}
#define EXPECT(first, step) expect(__LINE__, d, first, step)

struct Model { float* out; int n; void (*fill)(float*, const float*, size_t, float); };

template <typename T> static void through_a_template(T* out, int n) {
    scale<T, 2><<<dim3(4), 32>>>(out, nullptr, n); // the arguments depend on T, the kernel's name too
    scale<<<pick<int, 4>(), 32>>>(out, 0, n);
}

int main() {
    float *d, *ones;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaMalloc((void**)&d, sizeof host);
    cudaMalloc((void**)&ones, sizeof host);
    for (int i = 0; i < 128; i++) host[i] = 1;
    cudaMemcpy(ones, host, sizeof host, cudaMemcpyHostToDevice);
    int n = 128;
    Model model = {d, n, add}, *m = &model;

    add<<<4, 32>>>(d, ones, n, 2);                        EXPECT(3, 1); // int to size_t and to float
    add <<< dim3(2, 1), dim3(64) >>> (d, NULL, n, 0);     EXPECT(0, 1);
    add<<<n >> 5, 1 << 5>>>(d, 0, (size_t)n, 0);          EXPECT(0, 1);
    add<<<4, 32, 0, 0>>>(d, NOTHING, n);                  EXPECT(5, 1); // a default argument
    ::lib::add2<<<4, 32>>>(d, n);                         EXPECT(2, 1);
    lib::add2 BLOCKS (d, n);                              EXPECT(2, 1);
    m->fill<<<4, 32>>>(m->out, ones, m->n, 1.5f);         EXPECT(2.5f, 1);
    (*model.fill)<<<4, 32>>>(d, ones, n, 1);              EXPECT(2, 1);
    scale<float, 3><<<4, 32>>>(d, ones, n);               EXPECT(1, 3);
    scale<float, (4 > 3) ? 3 : 2><<<4, 32>>>(d, NULL, n); EXPECT(0, 3);
    scale<<<4, pick<int, 32>()>>>(d, ones, n);            EXPECT(1, 1); // T and N left to deduction
    through_a_template(d, n);                             EXPECT(0, 1);
    LAUNCH(scale, n, d, (const float*)NULL);              EXPECT(0, 1);
    if (n) add<<<4, 32>>>(d, ones, n, 1); else add<<<4, 32>>>(d, ones, n, 2);
    EXPECT(2, 1);
    for (int i = 0; i < 2; i++) scale<float, 1>
        <<<4, /* <<< */
           32>>>
        (d,
         // here, too, k<<<1, 1>>>(x)
         NULL,
         strcmp("a<<<1, 1>>>(b)", "(") > 0 && ')' ? n : 0);
    EXPECT(0, 1);

    float start = 1; // copied at the launch, not read when the kernel runs
    add<<<4, 32, 0, stream>>>(d, ones, n, start);
    start = 100;
    const float* gone = ones;
    add<<<4, 32, 0, stream>>>(d, gone, n, start++);
    gone = NULL;
    if (start != 101) failures++, printf("the arguments ran %g times\n", (double)(start - 100));
    cudaStreamSynchronize(stream);
    EXPECT(101, 1);

    reverse<float><<<4, 32, 32 * sizeof(float)>>>(d);     EXPECT(0, 1);
    reverse2<<<4, 32, 2 * 32 * sizeof(float)>>>(d);       EXPECT(0, 1);
    cudaFuncSetAttribute(reverse2, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);
    reverse2<<<4, 32, 100000>>>(d);                       EXPECT(0, 1);

    add<<<0, 32>>>(d, ones, n, 2);
    cudaError_t no_blocks = cudaGetLastError(), after = cudaGetLastError();
    scale<<<4, 2000>>>(d, ones, n);
    cudaError_t many_threads = cudaGetLastError();
    reverse<float><<<4, 32, 100000>>>(d); // no cudaFuncSetAttribute
    cudaError_t much_shared = cudaGetLastError();
    printf("errors %d %d %d %d\n", no_blocks, after, many_threads, much_shared);

    const char* text = "kernel<<<1, 2>>>(x); extern __shared__ float f[];";
    printf("%s\nline %d of %s\n", text, __LINE__, __FILE__);
    return failures;
}
'''

KERNELS = r'''
#pragma once
template <typename T, int N> constexpr T pick() { return N; }
__global__ void add(float* out, const float* in, size_t n, float more = 5) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (float)i + (in ? in[i] : 0.0f) + more;
}
namespace lib {
__global__ void add2(float* out, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = (float)i + 2;
}
} // namespace lib
template <typename T, int N = 1> __global__ void scale(T* out, const float* in, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = (T)(N * i) + (in ? in[i] : 0.0f);
}
template <typename T> __global__ void reverse(T* out) { // each thread reads what another wrote
    extern __shared__ __align__(16) unsigned char bytes[];
    T* values = reinterpret_cast<T*>(bytes);
    values[31 - threadIdx.x] = (T)(blockIdx.x * 32 + 31 - threadIdx.x);
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = values[threadIdx.x];
}
extern "C" {
namespace lib {
extern __shared__ float table[][32]; // outside of functions
}
extern int declared_only;
}
using lib::table;
__global__ void reverse2(float* out) {
    table[1][31 - threadIdx.x] = (float)(blockIdx.x * 32 + 31 - threadIdx.x);
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = table[1][threadIdx.x];
}
'''


def build(folder, *words, source="program.cu", check=True):
    command = [NVCC, "-std=c++17", "-O1", *words, source]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG)
    if check:
        assert result.returncode == 0, result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewrite it")
    (path / "program.cu").write_text(PROGRAM)
    (path / "kernels.cuh").write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def program(folder):
    build(folder, *WARNINGS, "-o", "program")
    return folder / "program"


@pytest.mark.parametrize("streams", ["eager", "lazy"])
@pytest.mark.parametrize("order", ["fwd", "rev", "rand:3"])
def test_every_form_of_launch(program, streams, order):
    result = run([str(program)], env={"CUDA_CPU_STREAMS": streams, "CUDA_CPU_SCHED": order})
    lines = result.out.splitlines()
    assert lines[0] == "errors 9 0 9 1"  # invalid configuration (twice), invalid value
    assert lines[1] == "kernel<<<1, 2>>>(x); extern __shared__ float f[];"
    here = next(i for i, row in enumerate(PROGRAM.split("\n"), 1) if "__LINE__, __FILE__" in row)
    assert lines[2] == f"line {here} of program.cu"


def test_a_launch_can_be_made_to_fail(program):
    result = run([str(program)], env={"CUDA_CPU_FAIL": "cudaLaunchKernel:2"}, check=False)
    assert result.code == 1 and "unknown error, element 0" in result.out


@pytest.mark.parametrize("code, message", [
    ("add<<<4, 32>>>(d, ones, n, 2);\n    int oops = undeclared;", "undeclared"),
    ("add<<<4,\n 32>>>(d,\n ones, undeclared, 2);", "undeclared"),
    ("add<<<4, 32>>>(d, ones, m, 2);", "does not convert"),
    ("scale<<<4, 32>>>(d);", "no kernel of this name takes"),
    ("add<<<4, 32>>(d, ones, n, 2);", "ends this launch"),
])
def test_messages_name_the_original_line(folder, code, message):
    before = PROGRAM.partition("    add<<<4, 32>>>(d, ones, n, 2);")[0]
    (folder / "wrong.cu").write_text(f"{before}    {code}\n    return 0;\n}}\n")
    text = (folder / "wrong.cu").read_text().split("\n")
    word = next(word for word in ("undeclared", ", m, 2", "(d);", "32>>(") if word in code)
    here = max(i for i, row in enumerate(text, 1) if word in row)
    result = build(folder, "-c", "-o", "wrong.o", source="wrong.cu", check=False)
    assert result.returncode != 0
    assert message in result.stderr, result.stderr[-3000:]
    assert re.search(rf"wrong\.cu:{here}\b", result.stderr), result.stderr[-3000:]


def test_dependencies_name_the_sources(folder):
    build(folder, "-c", "-MMD", "-MP", "-o", "deps.o")
    rule = (folder / "deps.d").read_text()
    assert rule.startswith("deps.o:") and "program.cu" in rule and "kernels.cuh" in rule
    assert "cuda_runtime.h" not in rule and ".ii" not in rule
    build(folder, "-c", "-MD", "-MF", "other.d", "-MT", "target", "-o", "deps.o")
    rule = (folder / "other.d").read_text()
    assert rule.startswith("target:") and "cuda_runtime.h" in rule


def test_our_own_sources_need_no_rewriting():
    for source in [*TOP.glob("*.cu"), *TOP.glob("llmc_zero/*.cuh"), *TOP.glob("dev/*.cu")]:
        assert rewrite.rewrite(without_comments(source.read_text())) is None, source


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


@pytest.mark.parametrize("text, kernel", [
    ("a = b; k", "k"), ("if (x) k", "k"), ("return n::k<a->b, (c > d)>", "n::k<a->b, (c > d)>"),
    ("{ ::k<v<v<int>>>", "::k<v<v<int>>>"), ("else p->q.r", "p->q.r"), ("x ? f(1, 2)", "f(1, 2)"),
    ("else (*k)", "(*k)"), ("; t[i + 1]", "t[i + 1]"), ("a, T::template k<3> ", "T::template k<3> "),
    ("return ::a::k", "::a::k"), ("do k<s::size>", "k<s::size>"),
])
def test_where_the_kernels_name_begins(text, kernel):
    assert text[rewrite.start_of_kernel(text, len(text)):] == kernel


LEANS_ON = r'''
#include <stdio.h>
extern "C" int nvmlInit_v2(void);
extern "C" const char* nvmlErrorString(int);
__global__ void one(int* out) { *out = 1; }
int main() {
    int* managed;
    printf("%d\n", cudaMallocManaged((void**)&managed, 4));
    // CUDA 12's forms
    printf("%d\n", cudaMemAdvise(managed, 4, cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId));
    printf("%d\n", cudaMemPrefetchAsync(managed, 4, 0));
    int on_stack;
    printf("%d\n", cudaMemAdvise(&on_stack, 4, cudaMemAdviseSetReadMostly, 0));
    printf("%s\n", nvmlErrorString(nvmlInit_v2()));
    one<<<1, 1>>>(managed);
    fflush(stdout);
    cudaMemset(managed, 0, 16); // within what a GPU would have allocated
    printf("end\n");
}
'''


def test_what_third_party_programs_lean_on(folder):
    (folder / "leans.cu").write_text(LEANS_ON)
    build(folder, "-o", "leans", "-lnvidia-ml", source="leans.cu")
    lines = ["0", "0", "0", "1", "Driver Not Loaded"]
    assert run([str(folder / "leans")], env={"CUDA_CPU_ROUND": "512"}).out.splitlines() == lines + ["end"]
    strict = run([str(folder / "leans")], check=False)
    assert strict.code == 99 and strict.out.splitlines() == lines and "allocation of 4 bytes" in strict.err


# ----------------------------------------------------------------------------
# the real llm.c

LLMC = os.environ.get("LLMC_DIR")
real = pytest.mark.skipif(not LLMC, reason="LLMC_DIR names no checkout of llm.c")
VOCABULARY = make_files.TINY[1]


def tiny_files(folder):
    for precision in ("FP32", "BF16"):
        make_files.write_model(folder / f"{precision}.bin", precision)
    make_files.write_tokens(folder / "tokens.bin", [TOP / "README.md"])


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """losses(precision, ranks): of 10 steps of the unpatched trainer; each precision is built once."""
    folder = tmp_path_factory.mktemp("llmc")
    tiny_files(folder)
    mpi = [subprocess.check_output([launch.mpi_tool("mpicc"), f"-showme:{what}"], text=True).split()
           for what in ("compile", "link")]

    def train(precision, ranks):
        program = folder / f"train_{precision}"
        if not program.exists():
            build(LLMC, "-O3", "--use_fast_math", "-DMULTI_GPU", "-DUSE_MPI", f"-DENABLE_{precision}",
                  *mpi[0], "-lcublas", "-lcublasLt", "-lnccl", *mpi[1], "-o", str(program),
                  source="train_gpt2.cu")
        tokens = str(folder / "tokens.bin")
        # CUDA_CPU_ROUND: it reduces 4 floats where it has allocated one
        result = run([str(program), "-i", tokens, "-j", tokens, "-e", str(folder / f"{precision}.bin"),
                      "-b", "2", "-t", "64", "-x", "10", "-v", "10", "-m", "1", "-s", "0", "-l", "0.001"],
                     ranks=ranks, cwd=folder, env={"CUDA_CPU_ROUND": "512"})
        return [float(loss) for loss in re.findall(r"^step .*?\| loss ([0-9.]+)", result.out, re.M)]
    return train


@real
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_real_trainer_learns(losses, ranks):
    import math
    fp32, bf16 = losses("FP32", ranks), losses("BF16", ranks)
    assert len(fp32) == len(bf16) == 10
    assert abs(fp32[0] - math.log(VOCABULARY)) < 0.2 and fp32[-1] < fp32[0] - 0.5
    assert max(abs(a - b) for a, b in zip(fp32, bf16)) < 0.01


@real
@pytest.mark.parametrize("source", ["test_gpt2.cu", "profile_gpt2.cu"])
def test_the_other_real_programs_link(source, tmp_path):
    build(LLMC, "-O0", "-DENABLE_BF16", "-lcublas", "-lcublasLt", "-o", str(tmp_path / "program"),
          source=source)
    assert Path(tmp_path / "program").exists()
