#!/usr/bin/env bash
# dev/llmc/compare.sh DIR [...] - trains the llm.c in folder DIR with sharding off and on, and compares.
#
#   DIR             a checkout of llm.c or of a fork, patched or not. It is not changed: a copy of its
#                   sources in build/llmc/src is patched (dev/llmc/patch.py) and built for the GPU if there is
#                   one and nvcc, else with dev/cpu/nvcc for the processor
#   --ranks N       (2)
#   --steps N       (20)
#   --stage S       which stage to compare with off: 1 (default), 2 or 3. Stages 2 and 3 reduce each micro-step, so
#                   off does, too, then (-A micro)
#   --precision P   BF16 (default) or FP32
#   --model M       tiny (default): 2 layers, 290,000 random weights. d12: 12 layers as GPT-2 124M, or another
#                   descriptor of llm.c. A file that ends with .bin: a model file of llm.c
#   --text T ...    what to train on, a token a byte: files and folders (README.md and llmc_zero/)
#   --flags "F .."  more flags of train_gpt2, for all runs; the last of a repeated flag wins
#   --speed         trains llm.c without llmc_zero too (patch.py --mends-only), for its step time
#   --drop-own-code as in patch.py
#   --no-install    installs nothing; without matplotlib there is no picture
#   --nvcc-only     compiles and links train_gpt2, test_gpt2 and profile_gpt2 with the real nvcc for sm_80, 90
#                   and 100, and runs nothing: no GPU is needed. JOBS=n compiles n at a time
#
# Both runs start from the same weights and see the same data, other data on each rank, and are clipped. What
# has to be equal: every printed digit of loss, norm and validation loss, and the bytes of the last step's
# model file. The runs are left in build/llmc/z0 and, say, build/llmc/z1 (main.log, output.txt, the model), their
# curves in build/llmc/loss.png. Ranks are started by mpirun; without MPI (NO_MPI=1), and where they have to
# share GPUs, by this script through a file.
#
# Exit code: 0 all is equal, 1 something differs, 2 it did not come to that (one line says why).
set -euo pipefail
export LC_ALL=C   # a point in numbers, whatever the language of the caller
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
top=$PWD
work=build/llmc

# One job of --nvcc-only: a name for the log, the program, two settings for make.
if [[ ${1:-} == --job ]]; then
    log=$work/check/$2-$3.log
    if make -s "$work/check/$2/$3" "${@:4}" >"$log" 2>&1 &&
        ! { [[ $2 == no-multi-GPU ]] && grep -o '[^ ]*/nccl\.h' "$work/check/$2.d" >>"$log"; }; then
        echo "compare: nvcc: $3, $2: fine"
        exit 0
    fi
    printf 'compare: nvcc: %s, %s: FAILED\n%s\n' "$3" "$2" "$(tail -n 30 "$log")"
    exit 1
fi

die() { echo "compare: $*" >&2; exit 2; }
of_caller() { case $1 in /*) echo "$1" ;; *) echo "$caller/$1" ;; esac; }

# ---- arguments ---------------------------------------------------------------------------------------------

dir="" ranks=2 steps=20 stage=1 precision=BF16 model=tiny flags=() texts=() own=() speed="" install=1 nvcc_only=""
count() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || die "$1 $2: a number from 1 up"; }
while (($#)); do
    case $1 in
    --ranks | --steps | --stage | --precision | --model | --text | --flags)
        (($# > 1)) || die "$1 needs a value" ;;&
    --ranks) count "$1" "$2"; ranks=$2; shift 2 ;;
    --steps) count "$1" "$2"; steps=$2; shift 2 ;;
    --stage) stage=$2; shift 2 ;;
    --precision) precision=$2; shift 2 ;;
    --model) model=$2; shift 2 ;;
    --flags) read -ra flags <<<"$2"; shift 2 ;;
    --text)
        shift
        while (($#)) && [[ $1 != --* ]]; do texts+=("$(of_caller "$1")"); shift; done ;;
    --speed) speed=1; shift ;;
    --drop-own-code) own=("$1"); shift ;;
    --no-install) install=""; shift ;;
    --nvcc-only) nvcc_only=1; shift ;;
    --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$top/dev/llmc/compare.sh"; exit 0 ;;
    -*) die "$1: no such option; --help lists them" ;;
    *) [[ -z $dir ]] || die "$1: DIR is $dir already"
        [[ -n $1 ]] || die "DIR is empty: the folder of llm.c (make llmc LLMC_DIR=...)"
        dir=$1; shift ;;
    esac
done
case $stage in 1 | 2 | 3) ;; *) die "--stage $stage: 1, 2 or 3" ;; esac
case $precision in BF16 | FP32) ;; *) die "--precision $precision: BF16 or FP32" ;; esac
[[ -n $dir ]] || die "DIR is missing: the folder of llm.c; --help says more"
source=$(of_caller "$dir")
[[ -d $source ]] || die "$dir is not a folder"
case $(cd "$source" && pwd -P)/ in "$(pwd -P)/$work/"*) die "$dir is a folder of this script, which empties it" ;; esac
for file in train_gpt2.cu llmc/zero.cuh; do
    [[ -f $source/$file ]] || die "$dir is no checkout of llm.c: it has no $file"
done
case $model in
*.bin) model=$(of_caller "$model"); [[ -f $model ]] || die "$model: no such model file" ;;
tiny | d[0-9]* | gpt2:d[0-9]* | gpt3:c[0-9]*) ;;
*) die "--model $model: tiny, a file that ends with .bin, or a descriptor (d12, gpt2:d24, gpt3:c768)" ;;
esac
mkdir -p "$work"
if command -v flock >/dev/null; then   # two runs at a time would write to the same folders
    exec 8>"$work/.lock"
    flock -n 8 || { echo "compare: waiting for another run to end"; flock 8; }
fi

# ---- a patched copy ----------------------------------------------------------------------------------------

python=$([[ -x .venv/bin/python ]] && echo "$top/.venv/bin/python" || echo python3)
# before anything is installed; 3: but for headers that dev/deps.sh brings
said=$("$python" dev/llmc/patch.py "$source" --check "${own[@]}" 2>&1 >/dev/null) || (($? == 3)) ||
    die "the patch does not fit this llm.c: $said"

patched() {   # patched TO OPTION...: a patched copy of the sources of llm.c, and of what else the patch knows
    local to=$work/$1
    shift
    rm -rf "$to"
    mkdir -p "$to"
    "$python" dev/llmc/patch.py "$source" --files >"$work/patch.files"
    (cd "$source" && {
        find . \( -name .git -o -samefile "$top" \) -prune -o -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o \
            -name '*.cuh' -o -name '*.cpp' -o -name '*.hpp' \) -printf '%P\0'
        tr '\n' '\0' <"$top/$work/patch.files"
    } | sort -zu | tar --null -T - --mode=u+w -cf -) | tar -xf - -C "$to"
    "$python" dev/llmc/patch.py "$to" "$@" >"$work/patch.log" 2>&1 || die "$(cat "$work/patch.log")"
}

# NVML's library comes with the driver, one to link with comes with the toolkit; llm.c can do without.
find_nvml() {
    local stubs=${CUDA_HOME:-/usr/local/cuda}/lib64/stubs
    for NVML_LIBS in "-L$stubs -lnvidia-ml" "-Xlinker -l:libnvidia-ml.so.1" ""; do
        # shellcheck disable=SC2086
        echo 'int main() {}' | g++ -x c++ - -o /dev/null ${NVML_LIBS/-Xlinker /-Wl,} 2>/dev/null && break
    done
    export NVML_LIBS
}

# ---- the real nvcc alone -----------------------------------------------------------------------------------

nvcc_jobs() {
    export DEVICE=cuda
    [[ -z $install ]] || dev/deps.sh cuda || die "no nvcc or no NCCL here, and none could be fetched"
    local nvcc=${NVCC:-$(command -v nvcc || true)} one="-arch=sm_90" all="" candidate sm name
    for candidate in "$nvcc" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "$top/.venv/cuda/bin/nvcc"; do
        if [[ -x $candidate && $candidate != *dev/cpu* ]]; then nvcc=$candidate; break; fi
        nvcc=""
    done
    [[ -n $nvcc ]] || die "no nvcc here"
    [[ -n ${NCCL_HOME:-} || ! -d .venv/nccl ]] || export NCCL_HOME=.venv/nccl
    export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$nvcc")")}
    find_nvml
    echo '#include <nvtx3/nvToolsExt.h>' >"$work/probe.cu"
    "$nvcc" -E "$work/probe.cu" >/dev/null 2>&1 ||
        die "llm.c includes nvtx3/nvToolsExt.h, and this CUDA has none: dev/deps.sh fetches it (nvidia-nvtx)"
    patched src "${own[@]}"
    rm -rf "$work/check"
    mkdir -p "$work/check"
    for sm in 80 90 100; do all+=" -gencode arch=compute_$sm,code=sm_$sm"; done
    local jobs=()
    for name in train_gpt2 test_gpt2 profile_gpt2; do
        for precision in BF16 FP32; do
            jobs+=("$precision" "$name" "PRECISION=$precision" "DEVICE_FLAGS=$all")
        done
    done
    jobs+=(no-MPI train_gpt2 NO_MPI=1 "DEVICE_FLAGS=$one")
    jobs+=(no-multi-GPU train_gpt2 NO_MULTI_GPU=1 "DEVICE_FLAGS=$one -MD -MF $work/check/no-multi-GPU.d")
    local start=$SECONDS failed=""
    export NVCC=$nvcc
    printf '%s\0' "${jobs[@]}" |
        xargs -0 -n 4 -P "${JOBS:-$(nproc)}" "$top/dev/llmc/compare.sh" --job || failed=1
    [[ -z $failed ]] || { echo "compare: nvcc FAILED (see above), $((SECONDS - start)) s"; exit 1; }
    echo "compare: nvcc: $((${#jobs[@]} / 4)) jobs, all fine, $((SECONDS - start)) s"
}

if [[ -n $nvcc_only ]]; then nvcc_jobs; exit 0; fi

# ---- build -------------------------------------------------------------------------------------------------

found() { make -s help | sed -n "s/^device: \([a-z]*\) .*MPI: \(.*\)$/$1/p"; }
device=$(found '\1')
[[ -z $install ]] || DEVICE=$device dev/deps.sh demo || die "dev/deps.sh could not install what is missing"
python=$([[ -x .venv/bin/python ]] && echo "$top/.venv/bin/python" || echo python3)
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
[[ $device == cuda ]] || gpus=0
# llm.c gives each rank that mpirun starts a GPU of its own.
((gpus == 0 || ranks <= gpus)) || export NO_MPI=1
[[ -n ${NO_MPI:-} || $(found '\2') != no ]] || export NO_MPI=1
[[ $device == cpu ]] || find_nvml

program() {   # program NAME FROM: builds $work/NAME/train_gpt2 from $work/FROM, unless nothing has changed
    local target=$work/$1/train_gpt2 log=$work/$1/build.log words=("PRECISION=$precision" "FROM=$work/$2")
    local start=$SECONDS is
    mkdir -p "$work/$1"
    is=$(make -s -n "$target" "${words[@]}"; cd "$work/$2" && find . -type f -exec sha256sum {} + | sort
         [[ $device == cuda ]] || { cd "$top/dev/cpu" && find . -type f -exec sha256sum {} + | sort; })
    if [[ -x $target && $(cat "$work/$1/stamp" 2>/dev/null) == "$is" ]]; then return; fi
    rm -f "$work/$1/stamp"
    echo "compare: building train_gpt2, $precision, $device${NO_MPI:+, without MPI}${3:+, $3}"
    if ! make -s "$target" "${words[@]}" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        ! grep -q 'nvtx3/.*No such file' "$log" ||
            die "llm.c includes nvtx3, which is not here: rm -r .venv/cuda-headers, then dev/deps.sh"
        die "train_gpt2.cu did not compile; all of it is in $log"
    fi
    echo "$is" >"$work/$1/stamp"
    echo "  $((SECONDS - start)) s"
}

kind=$precision${NO_MPI:+-no-mpi}
patched src "${own[@]}"
program "$kind" src
if [[ -n $speed ]]; then
    patched src-mends --mends-only
    program "$kind-mends" src-mends "without llmc_zero"
fi

# ---- files -------------------------------------------------------------------------------------------------

((${#texts[@]} > 0)) || texts=(README.md llmc_zero)
"$python" dev/llmc/make_files.py tokens "$work/tokens.bin" "${texts[@]}" >"$work/files.log" 2>&1 ||
    die "$(tail -n 1 "$work/files.log")"
# small batches on a processor; llm.c's own defaults on a GPU
batch=(-b 1 -t 64)
shown=$(basename "$model" .bin)
case $model in
tiny)
    model=model.bin
    "$python" dev/llmc/make_files.py model "$work/model.bin" --precision "$precision" >/dev/null ;;
*.bin)
    length=$(od -An -td4 -j8 -N4 "$model" | tr -d ' ')
    ((gpus == 0)) || batch=(-b 4 -t "$length")
    ((length >= 64)) || batch=(-b 1 -t "$length") ;;
*)
    ((gpus == 0)) || batch=(-b 4 -t 1024) ;;
esac

tokens=$(sed -n 's/.*: \([0-9]*\) tokens$/\1/p' "$work/files.log")
words=("${batch[@]}" "${flags[@]}" "") taken=$ranks
for letter in b t; do   # the last of a repeated flag wins
    for ((i = ${#words[@]} - 2; i >= 0; i--)); do [[ ${words[i]} != "-$letter" ]] || break; done
    [[ ! ${words[i + 1]} =~ ^[1-9][0-9]*$ ]] || taken=$((taken * words[i + 1]))
done
((tokens > taken)) ||
    die "$tokens bytes of text are too few: $ranks ranks take $((taken + 1)) at a time; name more with --text"

# ---- train -------------------------------------------------------------------------------------------------

last_words() { tail -n 15 "$1" >&2; die "$2; all of it is in $1"; }

# without_mpi COMMAND...: starts the ranks, which meet through a file; one that fails ends the others.
without_mpi() {
    local rank code=0 own
    pids=()
    trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT   # this script may be interrupted
    rm -f ncclUniqueId.sync   # of an earlier run: a rank would take it for this one's
    for ((rank = 0; rank < ranks; rank++)); do
        own=()
        ((gpus == 0 || ranks <= gpus)) || own=("NCCL_HOSTID=rank$rank" NCCL_SOCKET_IFNAME=lo)
        env "${own[@]}" "$@" -pi fs -pf . -pn "$ranks" -pr "$rank" -pg "$((gpus ? gpus : ranks))" &
        pids+=($!)
    done
    for ((rank = 0; rank < ranks; rank++)); do
        if ! wait -n; then code=1; kill "${pids[@]}" 2>/dev/null || true; fi
    done
    pids=()
    rm -f ncclUniqueId.sync
    return $code
}

train() {   # train NAME PROGRAM FLAG...: a run in $work/NAME
    local name=$1 start=$SECONDS run=() code=0
    run=("$2/train_gpt2" -i tokens.bin -j tokens.bin -e "$model" "${batch[@]}" -l 0.001 -c 0.1 -v 10 -m 2
        -s 0 "${flags[@]}" -x "$steps" -o "$name" "${@:3}")
    rm -rf "${work:?}/$name"
    mkdir -p "$work/$name"
    echo "\$ $ranks x ${run[*]}"
    if [[ -n ${NO_MPI:-} ]]; then
        (cd "$work" && without_mpi "./${run[0]}" "${run[@]:1}") >"$work/$name/output.txt" 2>&1 || code=$?
    else
        (cd "$work" && "$python" "$top/dev/launch.py" "$ranks" "./${run[0]}" "${run[@]:1}") \
            >"$work/$name/output.txt" 2>&1 </dev/null || code=$?
    fi
    ((code == 0)) || last_words "$work/$name/output.txt" "the run $name ended with an error"
    [[ -s $work/$name/main.log ]] || last_words "$work/$name/output.txt" "the run $name left no log"
    rm -f "$work/$name"/state_*.bin "$work/$name"/step_*.safetensors "$work/$name"/DONE_*
    echo "  $((SECONDS - start)) s; output in $work/$name/output.txt"
}
on=z$stage micro=()
((stage < 2)) || micro=(-A micro)
train z0 "$kind" -n "$steps" -z 0 "${micro[@]}"
train "$on" "$kind" -n "$steps" -z "$stage"
[[ -z $speed ]] || train mends "$kind-mends" -n 0 -z 0

# ---- compare -----------------------------------------------------------------------------------------------

picture=(--png "$work/loss.png" --names "off (-z 0)" "sharded (-z $stage)"
    --title "llm.c on $ranks ranks, $shown, $precision: sharding off and on")
"$python" -c 'import matplotlib' 2>/dev/null || { picture=(); echo "no picture: matplotlib is not there"; }
echo
wrong=0
"$python" dev/compare_loss.py "$work/z0" "$work/$on" "${picture[@]}" || wrong=$?
((wrong < 2)) || die "the logs cannot be compared"

number() { sed -n "s/^llmc_zero: stage.*$1 \([0-9]*\).*/\1/p" "$work/$2/output.txt"; }
in_use() { sed -n 's/^device memory usage: \([0-9]*\) MiB .*/\1/p' "$work/$1/output.txt"; }
step_ms() {   # the median without the first step, or with it if that is all
    sed -n 's/^step .*| \([0-9.]*\) ms |.*/\1/p' "$work/$1/output.txt" |
        { if ((steps > 1)); then sed 1d; else cat; fi; } | sort -g |
        awk '{ v[NR] = $1 } END { print NR ? (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 : "nan" }'
}
mb() { awk -v bytes="$1" 'BEGIN { printf "%.3f", bytes / 1e6 }'; }
line() { printf '%-44s %14s %14s%s\n' "$1" "$2" "$3" "${4:+$(printf ' %14s' "$4")}"; }
state=$(sed -n 's/^llmc_zero: stage.*, \(m + v[^0-9]*\) [0-9].*/\1/p' "$work/z0/output.txt")
state_bytes() { number "${state//+/[+]}" "$1"; }
echo
line "" "-z 0, off" "-z $stage, 1/$ranks" ${speed:+"no llmc_zero"}
line "MB a rank: parameters" "$(mb "$(number parameters z0)")" "$(mb "$(number parameters "$on")")"
line "           gradients" "$(mb "$(number gradients z0)")" "$(mb "$(number gradients "$on")")"
line "           $state" "$(mb "$(state_bytes z0)")" "$(mb "$(state_bytes "$on")")"
where="this machine"
((gpus == 0)) || where="rank 0's GPU"
line "MiB in use on $where, all programs" "$(in_use z0)" "$(in_use "$on")" ${speed:+"$(in_use mends)"}
line "ms a step, median" "$(step_ms z0)" "$(step_ms "$on")" ${speed:+"$(step_ms mends)"}
echo
failed=0 plain_wrong=0
check() { printf '  %-3s  %s\n' "$([[ $1 == 0 ]] && echo yes || echo NO)" "$2"; [[ $1 == 0 ]] || failed=1; }
name=$(printf 'model_%08d.bin' "$steps")
clipped=$(sed -n 's/.* norm:\([^ ]*\).*/\1/p' "$work/z0/main.log" | awk '$1 > 1 { n++ } END { print n + 0 }')
smaller=$(awk -v off="$(state_bytes z0)" -v on="$(state_bytes "$on")" -v ranks="$ranks" \
    'BEGIN { print !(on * ranks >= off && on * ranks <= off * 1.01 + 8192 * ranks) }')
finite=$(grep -c '^s:[0-9]* trl:[0-9]' "$work/$on/main.log" || true)
learns=0   # NaN equals NaN, and weights that stay equal themselves
((finite == steps)) || learns=1
[[ $model != *.bin ]] || ! (cd "$work" && cmp -s "$model" "$on/$name") || learns=1
check $learns "$finite of $steps steps have a loss, and the weights have changed"
check "$wrong" "loss, norm, validation loss: the same digits; clipped in $clipped of $steps steps"
model_wrong=0
if ! said=$(cmp "$work/z0/$name" "$work/$on/$name" 2>&1); then model_wrong=1; echo "$said"; fi
check $model_wrong "the model after $steps steps: the same $(stat -c %s "$work/z0/$name") bytes"
check "$smaller" "$state: 1/$ranks of off, up to padding"
if [[ -n $speed ]]; then   # sums in another order, weights rounded at random: about the same loss
    for run in mends z0; do sed -n 's/ lr:.*//p' "$work/$run/main.log" >"$work/mends/$run.loss"; done
    said=$("$python" dev/compare_loss.py "$work/mends/mends.loss" "$work/mends/z0.loss" --tol 0.05) ||
        plain_wrong=1
    check $plain_wrong "llm.c without llmc_zero: about the same loss (${said##*compared, })"
fi
for what in "$learns:nothing was learnt, so nothing was compared" "$wrong:the logs differ" "$model_wrong:the model files differ" \
    "$smaller:$state is not 1/$ranks of off" "$plain_wrong:llm.c without llmc_zero learns something else"; do
    [[ ${what%%:*} == 0 ]] || echo "compare: FAILED: ${what#*:}"
done
ratio() { awk -v a="$(step_ms "$1")" -v b="$(step_ms "$2")" 'BEGIN { printf "%.3f", a / b }'; }
if ((failed == 0)); then
    said="$state $(mb "$(state_bytes z0)") -> $(mb "$(state_bytes "$on")") MB a rank"
    said+="; step $(step_ms z0) -> $(step_ms "$on") ms"
    [[ -z $speed ]] || said+=", $(ratio z0 mends) and $(ratio "$on" mends) of llm.c without llmc_zero"
    echo "compare: $precision, $ranks ranks: log and model the same off and sharded; $said"
fi
exit $failed
