#!/usr/bin/env bash
# dev/gpu_check.sh [--dry-run] [--bench-only] - checks the project on a machine with nvcc and one GPU.
#
#   1. builds for the GPU found; with MPI if mpicc is there, else without. Nothing is installed or fetched.
#   2. the recipe off and sharded at 1, 2 and 4 ranks that share the one GPU: hash on = off, memory, time of
#      a step; the same with buckets, in bf16 with masters and in bf16 without; with -R ordered -A micro in all four
#      stages: one hash, memory, and a trace (timeline.*.json) of stage 3 with overlap and without
#   3. update and norm kernels as a share of copy and read bandwidth at 10M, 124M and 1G elements
#   4. with LLMC_DIR=a checkout of llm.c: llm.c with sharding off and on (dev/llmc/compare.sh), a tiny model
#      at 1, 2 and 4 ranks, and in stages 2 and 3: log and model on = off; GPT-2 124M at 1 rank: step time beside plain llm.c's
#   5. the unit tests
#   6. compute-sanitizer, memcheck and racecheck, on the unit tests that launch kernels
#
# NCCL and cuBLASLt may be there as Python packages only. GoogleTest, and the headers that checkpoints need, may come
# along with the checkout:
#   mkdir -p build/gtest && cp -r /usr/include/gtest /usr/src/googletest/googletest/src build/gtest
#   mkdir -p build/headers && cp -r /usr/include/xxh*.h /usr/include/nlohmann build/headers
#
# Prints one table and leaves it in build/gpu_check/table.txt. Ends within BUDGET seconds (340); every part
# has a limit of its own, and what no longer fits is in the table as "did not fit". Exit code 1 if any failed.
#   --dry-run     the same on the CPU build, with small sizes, a twentieth of each unit test, a BUDGET of 58
#                 (178 with LLMC_DIR)
#   --bench-only  part 3 alone; DEVICE=cpu runs it on the CPU build
set -eu   # no pipefail: greps below may well find nothing
export LC_ALL=C   # a point in numbers, whatever the language of the caller
[[ ${LLMC_DIR:-/} == /* ]] || LLMC_DIR=$PWD/$LLMC_DIR
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry="" bench_only=""
for word in "$@"; do
    case $word in
    --dry-run) dry=1 ;;
    --bench-only) bench_only=1 ;;
    *) echo "usage: dev/gpu_check.sh [--dry-run] [--bench-only]" >&2; exit 2 ;;
    esac
done
[[ -n $dry ]] && DEVICE=cpu
export DEVICE=${DEVICE:-cuda}
[[ -n $dry ]] && BUDGET=${BUDGET:-$((${LLMC_DIR:+120} + 58))}
deadline=$((SECONDS + ${BUDGET:-340}))
work=build/gpu_check
mkdir -p "$work/logs"
rows=$work/rows
: >"$rows"

have() { command -v "$1" >/dev/null 2>&1; }
row() { local IFS='|'; echo "$*" | tee -a "$rows"; }   # what | case | result | verdict
left() { echo $((deadline - SECONDS)); }

# limited SECONDS LOG COMMAND...: runs it with its output in a log, for at most that long and never past the
# deadline. Sets `outcome` to fine, FAILED or "did not fit".
limited() {
    local limit=$1 log=$work/logs/$2 code=0
    shift 2
    : >"$log"
    ((limit < $(left))) || limit=$(left)
    outcome="did not fit"
    ((limit >= 2)) || return 0
    timeout -k 2 "$limit" "$@" >"$log" 2>&1 || code=$?
    case $code in
    0) outcome=fine ;;
    124 | 137) outcome="did not fit" ;;
    *) outcome=FAILED; { echo "-- $*"; tail -n 15 "$log"; } >&2 ;;
    esac
}

# ---- what this machine has -------------------------------------------------------------------------------

mpirun=$(command -v mpirun || { [[ -x .venv/bin/mpirun ]] && echo .venv/bin/mpirun; } || true)
{ [[ -n $mpirun ]] && { mpicc -showme:link || .venv/bin/mpicc -showme:link; }; } >/dev/null 2>&1 || export NO_MPI=1
mpi=$([[ -n ${NO_MPI:-} ]] && echo "no MPI" || echo "MPI")
if [[ $DEVICE == cuda ]]; then
    toolkit=${CUDA_HOME:-/usr/local/cuda}
    PATH=$PATH:$toolkit/bin
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit/lib64
    if ! have nvcc || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo "gpu_check: needs nvcc and a GPU; --dry-run tries this script on the CPU build" >&2
        exit 2
    fi
    row "machine" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)" \
        "$(nvcc --version | sed -n 's/^.*release \([0-9.]*\),.*/nvcc \1/p')" "$mpi"
    # A library may be there as a Python package only, and then without a lib*.so for the linker.
    rm -rf "$work/libs"
    for name in nccl cublasLt ${LLMC_DIR:+cublas}; do   # cublasLt brings the headers of both
        [[ $name != nccl || -z ${NCCL_HOME:-} ]] || continue
        printf '#include <%s.h>\nint main() { void* volatile f = (void*)%sGetVersion; return !f; }\n' \
            "$name" "$name" >"$work/probe.cu"
        ! nvcc "$work/probe.cu" -l"$name" -o "$work/probe" >/dev/null 2>&1 || continue
        mapfile -t folders < <(python3 -c 'import sys; print("\n".join(filter(None, sys.path)))' 2>/dev/null)
        library=$(find -L /usr /opt "${HOME:-/root}" "${folders[@]}" -path "*/nvidia/*/lib/lib$name.so.[0-9]*" \
            2>/dev/null | head -n 1)
        [[ -n $library ]] || { echo "gpu_check: no lib$name to link with on this machine" >&2; exit 2; }
        mkdir -p "$work/libs/lib" "$work/libs/include"
        ln -sf "${library%/lib/*}/include/${name%Lt}"* "$work/libs/include/"
        ln -sf "$library" "$work/libs/lib/"
        ln -sf "$(basename "$library")" "$work/libs/lib/lib$name.so"
        export NCCL_HOME=$PWD/$work/libs
    done
else
    row "machine" "CPU build" "$(uname -m), $(nproc) cores" "$mpi"
fi

[[ ! -d build/headers ]] || export CPATH=$PWD/build/headers${CPATH:+:$CPATH}
[[ -n $bench_only ]] || printf '#include <xxhash.h>\n#include <nlohmann/json.hpp>\n' |
    g++ -E -x c++ -I.venv/include - >/dev/null 2>&1 ||
    { echo "gpu_check: xxhash.h and nlohmann/json.hpp are missing: see the top of this script" >&2; exit 2; }

build() {   # build LIMIT NAME TARGET...
    limited "$1" "build-$2" make -k -j"$(nproc)" "${@:3}"
    row "build" "$2" "" "$outcome"
}

# ---- 2: the recipe ---------------------------------------------------------------------------------------

# As in dev/launch.py: root may, no ssh is needed, ranks of one machine talk through shared memory.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent=/bin/false
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_oob_tcp_if_include=lo OMPI_MCA_mpi_yield_when_idle=1

# One rank. NCCL takes several on one GPU if each has a host name of its own and they talk over the loopback.
cat >"$work/rank.sh" <<'RANK'
[ "$1" = 1 ] || export NCCL_HOSTID=rank${OMPI_COMM_WORLD_RANK:-$RANK} NCCL_SOCKET_IFNAME=lo
shift
exec "$@"
RANK
# All ranks without mpirun: ranks.sh RANKS FOLDER COMMAND...; they find each other through the folder.
cat >"$work/ranks.sh" <<'RANKS'
ranks=$1 folder=$2 code=0 pids=
shift 2
mkdir -p "$folder"
rank=0
while [ $rank -lt "$ranks" ]; do
    RANK=$rank sh "${0%ranks.sh}rank.sh" "$ranks" "$@" -pi fs -pf "$folder" -pn "$ranks" -pr $rank &
    pids="$pids $!"
    rank=$((rank + 1))
done
for pid in $pids; do wait "$pid" || code=1; done
exit $code
RANKS
# train RANKS FOLDER FLAG...: ./train_mlp on ranks that share the GPU
train() {
    local ranks=$1 folder=$2 command
    rm -rf "$folder"
    mkdir -p "$folder"
    command=(./train_mlp -o "$folder" "${@:3}")
    if [[ -n ${NO_MPI:-} ]]; then
        command=(sh "$work/ranks.sh" "$ranks" "$folder/ranks" "${command[@]}")
    else
        command=("$mpirun" --oversubscribe -np "$ranks" sh "$work/rank.sh" "$ranks" "${command[@]}")
    fi
    limited 40 "$(basename "$folder")" "${command[@]}"
}
# value KEY FOLDER: from summary.json; of a list the last number
value() { tr -d '\n' <"$2/summary.json" | sed "s/.*\"$1\": *\(\[[^]]*, *\)\?\"\?\([^],}\"]*\).*/\2/"; }
on_off() {   # on_off RANKS NAME FLAG...
    local ranks=$1 name=$2 off=$work/$2.$1.off on=$work/$2.$1.on numbers verdict="hash on = off"
    train "$ranks" "$off" -z 0 "${@:3}"
    [[ $outcome != fine ]] || train "$ranks" "$on" -z 1 "${@:3}"
    if [[ $outcome != fine ]]; then row "$name" "$ranks ranks" "" "$outcome"; return; fi
    numbers=$(printf 'peak %.4g -> %.4g MB, m and v %.4g -> %.4g MB, step %.3g -> %.3g ms' \
        "$(value peak_mb "$off")" "$(value peak_mb "$on")" \
        "$(value optimizer_state_mb "$off")" "$(value optimizer_state_mb "$on")" \
        "$(value step_ms "$off")" "$(value step_ms "$on")")
    [[ $(value params_hash "$on") == "$(value params_hash "$off")" ]] ||
        verdict="FAILED: hash on $(value params_hash "$on"), off $(value params_hash "$off")"
    row "$name" "$ranks ranks" "$numbers" "$verdict"
}
stages() {   # stages RANKS FLAG...
    local ranks=$1 stage folder peaks="" times="" hash verdict="one hash"
    for stage in 0 1 2 3; do
        folder=$work/stages.$ranks.z$stage
        train "$ranks" "$folder" -z $stage -R ordered -A micro "${@:2}"
        if [[ $outcome != fine ]]; then row "stages" "$ranks ranks, -z $stage" "" "$outcome"; return; fi
        ((stage > 0)) || hash=$(value params_hash "$folder")
        [[ $(value params_hash "$folder") == "$hash" ]] || verdict="FAILED: hash -z $stage $(value params_hash "$folder"), off $hash"
        peaks+=$(printf ' %.4g' "$(value peak_mb "$folder")") times+=$(printf ' %.3g' "$(value step_ms "$folder")")
    done
    row "stages" "$ranks ranks, ordered" "peak$peaks MB, step$times ms" "$verdict"
}
overlap() {   # overlap RANKS FLAG...: how long the compute stream stood still, in a run with overlap and in one without
    local ranks=$1 on times=""
    for on in 1 0; do
        train "$ranks" "$work/overlap.$ranks.$on" -z 3 -O $on -T "$work/timeline.$ranks.$on.json" "${@:2}"
        if [[ $outcome != fine ]]; then row "stage 3" "$ranks ranks, -O $on" "" "$outcome"; return; fi
        times+=" -O $on $(printf '%.3g of %.3g' "$(value exposed_ms "$work/overlap.$ranks.$on")" \
            "$(value step_ms "$work/overlap.$ranks.$on")")"
    done
    row "stage 3" "$ranks ranks" "exposed ms a step:$times" "fine"
}

# ---- 3: bandwidth ----------------------------------------------------------------------------------------

bandwidth() {
    local sizes=()
    [[ $DEVICE == cuda ]] || sizes=(20000 1000000)
    limited 60 bandwidth "$work/bandwidth" "${sizes[@]}"
    grep '|' "$work/logs/bandwidth" | tee -a "$rows"
    [[ $outcome == fine ]] || row "bandwidth" "" "" "$outcome"
}

# ---- 4: llm.c --------------------------------------------------------------------------------------------

# The update alone is part 3's: nothing in llm.c's output tells it from the rest of a step. Without MPI the
# same program serves ranks that share the GPU and one that does not.
llmc() {   # llmc LIMIT CASE FLAG...
    local limit=$1 name=$2
    limited "$limit" "llmc-${name// /-}" env NO_MPI=1 \
        dev/llmc/compare.sh "$LLMC_DIR" --no-install --precision BF16 "${@:3}"
    row "llm.c" "$name" "$(sed -n 's/^compare: BF16, .*; \(m + v\)/\1/p' "$work/logs/llmc-${name// /-}")" \
        "${outcome/fine/log and model on = off}"
}
llmc_runs() {
    local ranks stage
    [[ -n ${LLMC_DIR:-} ]] || return 0
    for ranks in 1 2 4; do llmc 120 "tiny, $ranks ranks" --ranks $ranks --steps $((dry ? 5 : 20)); done
    for stage in 2 3; do llmc 120 "tiny, stage $stage, 2 ranks" --stage $stage --steps $((dry ? 5 : 20)); done
    if [[ -n $dry ]]; then
        llmc 120 "tiny, step time" --ranks 1 --steps 5 --speed
    else
        llmc 120 "124M, step time" --ranks 1 --steps 12 --speed --model d12 --flags "-b 16 -t 1024"
    fi
}

# ---- 5: unit tests ---------------------------------------------------------------------------------------

has_gtest() { echo '#include <gtest/gtest.h>' | g++ -E -x c++ - >/dev/null 2>&1; }
own_gtest() {   # what came along in build/gtest, compiled beside all else
    export CPATH=$PWD/build/gtest${CPATH:+:$CPATH} LIBRARY_PATH=$PWD/$work${LIBRARY_PATH:+:$LIBRARY_PATH}
    local name
    for name in gtest-all gtest_main; do
        { g++ -O1 -c "build/gtest/src/$name.cc" -o "$work/$name.o" &&
            ar rcs "$work/lib${name%-all}.a" "$work/$name.o"; } &
    done
}

units=()
find_units() {
    local file name
    units=()
    for file in test/test_*.cu; do
        name=$(basename "$file" .cu)
        [[ $name == test_cpu_* ]] || { [[ -x build/test/$name ]] && units+=("$name"); }
        [[ -x build/test/${name}_fast ]] && units+=("${name}_fast")
    done
    return 0
}
unit_tests() {
    local name limit=60 share=()
    [[ -z $dry ]] || limit=10 share=(env GTEST_TOTAL_SHARDS=20 GTEST_SHARD_INDEX=0)
    for name in "${units[@]}"; do
        limited "$limit" "$name" "${share[@]}" "build/test/$name"
        row "unit test" "$name" "$(grep -o '[0-9]* tests\? .*ran' "$work/logs/$name" | tail -n 1)" "$outcome"
        if [[ $name == test_@(optimizer|stages) && -z ${NO_MPI:-} ]]; then
            limited "$limit" "$name-2" "$mpirun" --oversubscribe -np 2 "${share[@]}" \
                sh "$work/rank.sh" 2 "build/test/$name"
            row "unit test" "$name, 2 ranks" "" "$outcome"
        fi
    done
}

# ---- 6: sanitizer ----------------------------------------------------------------------------------------

# One tool on one program, an eighth of its tests at a time until the time is up.
sanitize() {
    local tool=$1 name=$2 part whole=0 said=""
    for part in 0 1 2 3 4 5 6 7; do
        limited 60 "$tool-$name-$part" env GTEST_TOTAL_SHARDS=8 GTEST_SHARD_INDEX=$part \
            compute-sanitizer --tool "$tool" --error-exitcode 9 "build/test/$name"
        [[ $outcome == "did not fit" ]] ||
            said=$(grep -o 'SUMMARY.*' "$work/logs/$tool-$name-$part" | tail -n 1)
        [[ $outcome == fine ]] || break
        whole=$((whole + 1))
    done
    row "$tool" "$name" "$whole of 8 parts; last: ${said:-no summary}" "$outcome"
}
sanitizer() {
    local tool name
    if [[ $DEVICE == cpu ]] || ! have compute-sanitizer; then
        row "compute-sanitizer" "memcheck, racecheck" "" "left out: none here"
        return
    fi
    for tool in memcheck racecheck; do
        for name in "${units[@]}"; do   # side by side: the programs are small, the cores many
            case $name in test_layout | test_memory | test_world) ;; *) sanitize "$tool" "$name" & ;; esac
        done
    done
    wait
}

# ---- all of it -------------------------------------------------------------------------------------------

if [[ -n $bench_only ]]; then
    build 120 bandwidth build/gpu_check/bandwidth
    bandwidth
else
    if [[ -d build/gtest/src ]] && ! has_gtest; then own_gtest; fi
    build 200 programs train_mlp build/gpu_check/bandwidth
    wait   # for own_gtest
    if has_gtest; then
        targets=(build/test/test_{adamw,grad_norm}_fast)
        for name in test/test_*.cu; do
            [[ $name == test/test_cpu_* ]] || targets+=("build/${name%.cu}")
        done
        build 200 units "${targets[@]}" &   # beside the recipe, whose times are a GPU's
    else
        row "unit tests" "$(cd test && echo test_*.cu)" "" "left out: no GoogleTest here"
    fi
    small=()
    [[ -z $dry ]] || small=(-L 4 -C 200)
    for ranks in 1 2 4; do on_off "$ranks" recipe "${small[@]}"; done
    own=("${small[@]}" -I own -x 5 -l 1e-4)
    on_off 2 buckets "${own[@]}" -K "${dry:+0.}25"
    on_off 2 bf16-masters "${own[@]}" -P bf16
    on_off 2 bf16-stochastic "${own[@]}" -P bf16 -w 0
    for ranks in 2 4; do stages "$ranks" "${own[@]}" -P bf16; done
    overlap 2 "${own[@]}" -x 10
    wait
    bandwidth
    llmc_runs
    find_units
    unit_tests
    sanitizer
fi

{
    echo
    if have column; then column -t -s '|' -o '  ' "$rows"; else tr '|' '\t' <"$rows"; fi
} | tee "$work/table.txt"
if grep -q 'FAILED' "$rows"; then echo "gpu_check: FAILED, $SECONDS s"; exit 1; fi
not_fitting=$(grep -c 'did not fit' "$rows" || true)
echo "gpu_check: nothing failed, $not_fitting rows did not fit, $SECONDS s"
