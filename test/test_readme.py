"""The code that the README shows compiles, and the targets and flags that it names exist."""

import re

from conftest import LONG, TOP, run

README = (TOP / "README.md").read_text()

AROUND = """#include "llmc_zero/llmc_zero.cuh"
#include <stdio.h>
enum { LAYERS = 3 };
static void ok(ZeroResult result) { if (result.code != ZERO_OK) { puts(result.text); _Exit(1); } }
int main() {
    const int ranks = 1, rank = 0, steps = 2;
    const size_t width = 10;
    const double lr = 1e-3;
    const ncclComm_t comm = NULL;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
%s
    zero_layout_free(&layout);
    puts("done");
}
"""


def test_the_example_compiles_and_runs(tmp_path):
    example = re.search(r"```c\n(.*?)```", README, re.S).group(1).replace('#include "llmc_zero/llmc_zero.cuh"\n', "")
    write = "cudaMemsetAsync(g, 0, zero_padded_count(&layout) / LAYERS / 2 * sizeof(float), stream);"
    example = example.replace("/* backward of unit u */", write)
    (tmp_path / "example.cu").write_text(AROUND % example)
    program = tmp_path / "example"
    folder = tmp_path / "a space"
    folder.mkdir()
    run([str(TOP / "dev/cpu/nvcc"), "-std=c++17", "-O1", "-I.", "-Xcompiler", "-Wall,-Wextra,-Werror",
         str(tmp_path / "example.cu"), "-o", str(program), "-lnccl"],
        env={"TMPDIR": folder}, timeout=LONG)
    assert run([str(program)]).out.endswith("done\n")


def test_flags_and_targets_exist():
    flags = set(re.findall(r"`(-[A-Za-z]\w*|--plan)[ `]", README.split("## train_mlp")[1].split("## Patching")[0]))
    options = (TOP / "dev/mlp/options.h").read_text()
    assert len(flags) > 20
    for flag in flags:
        assert f'{{"{flag}",' in options, flag
    for target in re.findall(r"(?:`|    )make ([a-z_-]+)", README):
        assert re.search(rf"^{target}:", (TOP / "Makefile").read_text(), re.M), target
