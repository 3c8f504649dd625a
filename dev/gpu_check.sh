#!/usr/bin/env bash
# dev/gpu_check.sh [--dry-run] [--bench-only] - checks the project on a machine with nvcc and one GPU.
#
#   1. builds for the GPU found; with MPI if mpicc is there, else without. Nothing is installed or fetched.
#   2. the recipe off and sharded at 1, 2 and 4 ranks that share the one GPU: hash on = off, memory, time of
#      a step; the same with buckets, in bf16 with masters and in bf16 without
#   3. update and norm kernels as a share of copy and read bandwidth at 10M, 124M and 1G elements
#   4. the unit tests
#   5. compute-sanitizer, memcheck and racecheck, on the unit tests
#
# Prints one table and leaves it in build/gpu_check/table.txt. Ends within BUDGET seconds (340); every part
# has a limit of its own, and what no longer fits is in the table as "did not fit". Exit code 1 if any failed.
#   --dry-run     the same on the CPU build, with small sizes, a twentieth of each unit test, a BUDGET of 58
#   --bench-only  part 3 alone; DEVICE=cpu runs it on the CPU build
set -eu   # no pipefail: greps below may well find nothing
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
[[ -n $dry ]] && BUDGET=${BUDGET:-58}
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
have mpicc || [[ -x .venv/bin/mpicc ]] || export NO_MPI=1
[[ -n $mpirun ]] || export NO_MPI=1
mpi=$([[ -n ${NO_MPI:-} ]] && echo "no MPI" || echo "MPI")
if [[ $DEVICE == cuda ]]; then
    PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
    if ! have nvcc || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo "gpu_check: needs nvcc and a GPU; --dry-run tries this script on the CPU build" >&2
        exit 2
    fi
    row "machine" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)" \
        "$(nvcc --version | sed -n 's/^.*release \([0-9.]*\),.*/nvcc \1/p')" "$mpi"
    # NCCL may be there as a Python package only, and then without a libnccl.so for the linker
    if [[ -z ${NCCL_HOME:-} ]] && ! echo '#include <nccl.h>' | nvcc -E -x cu - >/dev/null 2>&1; then
        header=$(find /usr /opt "$HOME" -path '*/nvidia/nccl/include/nccl.h' 2>/dev/null | head -n 1)
        [[ -n $header ]] || { echo "gpu_check: no nccl.h on this machine" >&2; exit 2; }
        package=${header%/include/nccl.h}
        mkdir -p "$work/nccl/lib"
        ln -sfn "$package/include" "$work/nccl/include"
        ln -sf "$package"/lib/libnccl.so.* "$work/nccl/lib/"
        ln -sf "$(basename "$package"/lib/libnccl.so.*)" "$work/nccl/lib/libnccl.so"
        export NCCL_HOME=$PWD/$work/nccl
    fi
else
    row "machine" "CPU build" "$(uname -m), $(nproc) cores" "$mpi"
fi

build() {   # build LIMIT NAME TARGET...
    limited "$1" "build-$2" make -k -j"$(nproc)" "${@:3}"
    row "build" "$2" "" "$outcome"
}

# ---- 2: the recipe ---------------------------------------------------------------------------------------

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
    limited 40 "$(basename "$folder")" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        OMPI_MCA_hwloc_base_binding_policy=none "${command[@]}"
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

# ---- 3: bandwidth ----------------------------------------------------------------------------------------

bandwidth() {
    local sizes=()
    [[ $DEVICE == cuda ]] || sizes=(20000 1000000)
    limited 60 bandwidth "$work/bandwidth" "${sizes[@]}"
    grep '|' "$work/logs/bandwidth" | tee -a "$rows"
    [[ $outcome == fine ]] || row "bandwidth" "" "" "$outcome"
}

# ---- 4: unit tests ---------------------------------------------------------------------------------------

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
    done
}

# ---- 5: sanitizer ----------------------------------------------------------------------------------------

sanitizer() {
    local tool name said
    if [[ $DEVICE == cpu ]] || ! have compute-sanitizer; then
        row "compute-sanitizer" "memcheck, racecheck" "" "left out: none here"
        return
    fi
    for tool in memcheck racecheck; do
        for name in "${units[@]}"; do
            limited 40 "$tool-$name" compute-sanitizer --tool "$tool" --error-exitcode 9 "build/test/$name"
            said=$(grep -o 'SUMMARY.*' "$work/logs/$tool-$name" | tail -n 1)
            row "$tool" "$name" "$said" "$outcome"
        done
    done
}

# ---- all of it -------------------------------------------------------------------------------------------

if [[ -n $bench_only ]]; then
    build 120 bandwidth build/gpu_check/bandwidth
    bandwidth
else
    build 120 programs train_mlp build/gpu_check/bandwidth
    small=()
    [[ -z $dry ]] || small=(-L 4 -C 200)
    for ranks in 1 2 4; do on_off "$ranks" recipe "${small[@]}"; done
    own=("${small[@]}" -I own -x 5 -l 1e-4)
    on_off 2 buckets "${own[@]}" -K "${dry:+0.}25"
    on_off 2 bf16-masters "${own[@]}" -P bf16
    on_off 2 bf16-stochastic "${own[@]}" -P bf16 -w 0
    bandwidth
    if echo '#include <gtest/gtest.h>' | g++ -E -x c++ - >/dev/null 2>&1; then
        build 150 units units
    else
        row "unit tests" "$(cd test && echo test_*.cu)" "" "left out: no GoogleTest here"
    fi
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
