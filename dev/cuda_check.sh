#!/usr/bin/env bash
# dev/cuda_check.sh - what the real CUDA compiler says about this project; no GPU needed. `make cuda-check`.
#
#   1. train_mlp, gpu_check and every kernel compiled for sm_80, sm_90 and sm_100, train_mlp without MPI, unit tests and the
#      programs that tests start for sm_90 (RUN_ALL=1: these too for all three), with warnings as errors, linked against the
#      real NCCL, cuBLASLt and MPI.
#   2. Each header of llmc_zero: alone, first, twice, in two translation units of one program. Those that are
#      for the host only also as C99 and C++ without nvcc. All of them with ZERO_NO_NCCL and without NCCL.
#   3. The PTX of the update, norm and sum kernels built with --use_fast_math: see dev/ptx_check.py.
#   4. With LLMC_DIR=a checkout of llm.c: its patched programs, see dev/llmc/compare.sh --nvcc-only.
#
# Where there is no nvcc, dev/deps.sh cuda fetches one from PyPI. Should that fail too (no network), the check
# says so and is skipped with exit code 0; with CI set it fails, so that CI cannot skip it in silence.
# NVCC names the compiler, NCCL_HOME a folder with include/ and lib/ of NCCL, JOBS how many run at once.
set -euo pipefail
[[ ${LLMC_DIR:-/} == /* ]] || export LLMC_DIR=$PWD/$LLMC_DIR
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=build/cuda-check
host_only=(check layout schedule memory numbers call_order)   # headers that need no CUDA

# One job: its name, then its command line. Its output goes to a file, which is shown if the job fails.
if [[ ${1:-} == --job ]]; then
    name=${2%%$'\t'*}
    if bash -c "${2#*$'\t'}" >"$work/$name.log" 2>&1; then
        echo "cuda-check: $name: fine"
        exit 0
    fi
    printf 'cuda-check: %s: FAILED\n%s\n%s\n' "$name" "${2#*$'\t'}" "$(head -n 40 "$work/$name.log")"
    exit 1
fi

# ---- tools -------------------------------------------------------------------------------------------------

# shellcheck source-path=SCRIPTDIR source=probe.sh disable=SC2034
device=cuda
. dev/probe.sh
DEVICE=cuda dev/deps.sh test
if ! dev/deps.sh cuda || [[ -z $(real_nvcc) ]]; then
    echo "cuda-check: no nvcc or no NCCL here, and none could be fetched: skipped"
    exit $((${CI:+1} + 0))
fi
nvcc=$(real_nvcc)
"$nvcc" --version | sed -n 's/^.*release/cuda-check: nvcc/p'
rm -rf "$work"
mkdir -p "$work"

nccl=${NCCL_HOME:-}
[[ -n $nccl || ! -d .venv/nccl ]] || nccl=.venv/nccl
nccl_flags=${nccl:+-I$nccl/include -L$nccl/lib}
mpicc=$(mpi_tool mpicc)
for_nvcc() { local words=${*//-pthread/}; echo "${words//-Wl,/-Xlinker }"; }
mpi="-DZERO_USE_MPI -DOMPI_SKIP_MPICXX $(for_nvcc "$("$mpicc" -showme:compile)")"
mpi_libs=$(for_nvcc "$("$mpicc" -showme:link)")

strict="-Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror"
common="-std=c++17 -I. $strict $nccl_flags"
one="-arch=sm_90"
all=""
for sm in 80 90 100; do all+=" -gencode arch=compute_$sm,code=sm_$sm"; done
libs="-lcublasLt -lnccl"

# ---- the jobs, longest first -------------------------------------------------------------------------------

jobs=()
job() { jobs+=("$1"$'\t'"$2"); }

[[ -z ${LLMC_DIR:-} ]] ||
    job llm.c "NVCC='$nvcc' JOBS=1 dev/llmc/compare.sh --no-install --nvcc-only \"\$LLMC_DIR\""
nvcc_all="'$nvcc' -O3 $common $all"
nvcc_one="'$nvcc' $common $one"
nvcc_tests=$nvcc_one
[[ ${RUN_ALL:-} != 1 ]] || nvcc_tests="'$nvcc' $common $all"
job train_mlp "$nvcc_all --use_fast_math $mpi train_mlp.cu -o $work/train_mlp $libs $mpi_libs"
job train_mlp_no_mpi "$nvcc_tests -O0 --use_fast_math train_mlp.cu -o $work/train_mlp_no_mpi $libs"
job gpu_check "$nvcc_all dev/gpu_check.cu -o $work/gpu_check $libs"
for file in test/test_*.cu test/*_program.cu; do
    name=$(basename "$file" .cu)
    [[ $name != test_cpu_* && -e $file ]] || continue
    gtest=$([[ $name != test_* ]] || echo "-lgtest_main -lgtest")
    job "$name" "$nvcc_tests -O0 $mpi $file -o $work/$name $libs $mpi_libs $gtest"
done

# Two files that each include the header twice, before anything else; the first one has main.
for header in llmc_zero/*.cuh; do
    name=$(basename "$header" .cuh)
    case $name in
    checkpoint | checkpoint_parts | checkpoint_grid | checkpoint_temporary | checkpoint_save | checkpoint_check | checkpoint_load) continue ;;   # checkpoint_folder.cuh includes these
    optimizer_setup | optimizer_params | optimizer_grads | slots) continue ;;   # optimizer.cuh includes these
    timeline | collectives | grad_norm | reduce | adamw | optimizer | optimizer_drop | replicas)
        [[ ${RUN_ALL:-} == 1 ]] || continue ;;   # llmc_zero.cuh includes these; alone with make test-all, on the CPU
    esac
    first=$work/$name.first.cu second=$work/$name.second.cu
    printf '#include "%s"\n#include "%s"\n' "$header" "$header" | tee "$first" >"$second"
    echo "int main(void) { return 0; }" >>"$first"
    printf 'int second(void);\nint second(void) { return 0; }\n' >>"$second"
    job "drop-in-$name" "$nvcc_one $first $second -o $work/drop-in-$name $libs"
    if [[ " ${host_only[*]} " == *" $name "* ]]; then
        warn="-I. -Wall -Wextra -Werror -pedantic"
        job "c99-$name" "gcc -std=c99 $warn -x c $first $second -o $work/c99-$name"
        job "c++-$name" "g++ -std=c++11 $warn -x c++ $first $second -o $work/c++-$name"
    fi
done
world="$work/world.first.cu $work/world.second.cu"
umbrella="$work/llmc_zero.first.cu $work/llmc_zero.second.cu"
job drop-in-world-mpi "$nvcc_one $mpi $world -o $work/drop-in-world-mpi $libs $mpi_libs"
job no-nccl "$nvcc_one -DZERO_NO_NCCL $umbrella -o $work/no-nccl &&
    ! $nvcc_one -DZERO_NO_NCCL -M $work/llmc_zero.first.cu | grep nccl.h"
job kernels "$nvcc_all --use_fast_math -c test/ptx_kernels.cu -o $work/kernels.o"
job ptx "'$nvcc' -O3 --use_fast_math $common -arch=compute_90 -ptx test/ptx_kernels.cu -o $work/kernels.ptx &&
    python3 dev/ptx_check.py $work/kernels.ptx"

start=$SECONDS
if printf '%s\0' "${jobs[@]}" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" "${BASH_SOURCE[0]}" --job; then
    cat "$work/ptx.log"
    echo "cuda-check: ${#jobs[@]} jobs, all fine, $((SECONDS - start)) s"
else
    echo "cuda-check: FAILED (see above), $((SECONDS - start)) s"
    exit 1
fi
