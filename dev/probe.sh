# dev/probe.sh - asks whether what the project uses of a part compiles, links and runs here; sourced by dev/deps.sh
#
#   look_around   first, and after each change: finds out where make's compiler searches
#   works PART    whether dev/probes/PART.cpp does, built as make builds; if not, build/deps/DEVICE/PART.log says why
#
# A yes is kept in build/deps/DEVICE/PART together with all that it rests on: the compiler, the folders in which it and the
# linker search, and each file that they read, with sizes and times. When one of these differs the probe is built
# again, and so it is after a no.
# `device` is cpu or cuda, and says how make builds.
# shellcheck shell=bash source-path=SCRIPTDIR source=cpu/paths.sh
. dev/cpu/paths.sh

cxx=${CXX:-g++}
notes=build/deps/${device:?}

# What dev/deps.sh put into .venv is there because nothing else worked, so it comes first.
mpi_tool() { if [[ -x .venv/bin/$1 ]]; then echo ".venv/bin/$1"; else command -v "$1" || true; fi; }

# The nvcc of a toolkit: NVCC, else ours, else the one in PATH, else the toolkit's.
real_nvcc() {
    local nvcc
    for nvcc in "${NVCC:-}" .venv/cuda/bin/nvcc "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
        if [[ -x $nvcc && $nvcc != *dev/cpu* ]]; then echo "$nvcc"; return; fi
    done
}

look_around() {   # sets `search`, what leads the compiler as make's do, and `folders`, where it and the linker look
    search=("CPATH=$PWD/build/headers:$PWD/.venv/include${CPATH:+:$CPATH}" "$cxx")
    if [[ $device == cpu ]]; then
        cpu_paths "$PWD"
        search=(CPATH= "$cxx" "${includes[@]}" -DCUDA_CPU=1)
    fi
    mapfile -t folders < <(env "${search[@]}" -v -E -x c++ /dev/null 2>&1 | sed -n 's/^ \(\/[^ ]*\)$/\1/p'
        "$cxx" -print-search-dirs | sed -n 's/^libraries: =//p' | tr : '\n')
    mpicc=$(mpi_tool mpicc) mpirun=$(mpi_tool mpirun)
    read -ra mpi_compile < <("${mpicc:-false}" -showme:compile 2>/dev/null) || true
    read -ra mpi_link < <("${mpicc:-false}" -showme:link 2>/dev/null) || true
}

start_mpi() { timeout 60 python3 dev/launch.py 2 "$@"; }

try() {   # compiles, links and runs the probe of a part; leaves the names of all files that were read
    local part=$1 flags=() libraries=()
    local program=$notes/$part.program
    case $part in
    blas) libraries=("${blas[@]}") ;;
    gtest) libraries=(-lgtest_main -lgtest -lpthread) ;;
    mpi) flags=(-DOMPI_SKIP_MPICXX "${mpi_compile[@]}") libraries=("${mpi_link[@]}") ;;
    cuda | nccl) flags=(-fsyntax-only) ;;   # the CPU build has libraries of its own
    esac
    env "${search[@]}" -std=c++17 "${flags[@]}" -MD -MF "$notes/$part.d" "dev/probes/$part.cpp" -o "$program" \
        "${libraries[@]}" -Wl,--trace >"$notes/$part.libraries" || return
    case $part in
    cuda | nccl) ;;
    mpi)
        [[ -n $mpirun ]] || { echo "no mpirun"; return 1; }
        start_mpi "$program" ;;
    *) timeout 60 "$program" ;;
    esac
}

headers_of() { sed -e 's/^[^ ]*: //' -e 's/\\$//' "$notes/$1.d" | tr -s ' ' '\n'; }   # those that it read

rests_on() {   # all that the answer for a part rests on, as a checksum
    local part=$1 files=("${folders[@]}") headers name folder
    mapfile -t headers < <(sed -n 's/^ *#include <\(.*\)>.*/\1/p' "dev/probes/$part.cpp")
    for folder in "${folders[@]}"; do
        for name in "${headers[@]}"; do files+=("$folder/$name"); done
    done
    mapfile -t -O ${#files[@]} files < <(headers_of "$part"; tr -d '()' <"$notes/$part.libraries")
    [[ $part != mpi ]] || files+=("$mpicc" "$mpirun")
    {
        echo "$cxx ${blas[*]-} ${mpi_compile[*]} ${mpi_link[*]} ${LD_LIBRARY_PATH:-} ${folders[*]}"
        stat -L -c '%n %i %s %y %z' "$(command -v "$cxx")" "${files[@]}" 2>/dev/null || true   # some are not there
    } | cksum
}

works() {
    local part=$1
    [[ ! -e $notes/$part || $(rests_on "$part") != $(<"$notes/$part") ]] || return 0
    mkdir -p "$notes"
    rm -f "$notes/$part"
    try "$part" >"$notes/$part.log" 2>&1 || return
    rests_on "$part" >"$notes/$part"
}
