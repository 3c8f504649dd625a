# dev/cpu/paths.sh - where the CPU build finds headers and OpenBLAS; sourced by dev/cpu/nvcc and dev/probe.sh
#
#   cpu_paths ROOT   for the project in the folder ROOT sets
#     includes   -isystem flags, in the order in which they are searched
#     blas       flags that link OpenBLAS
#     toolkit    the folder of cuda_runtime.h; empty: only the compiler may know one
#
# What dev/deps.sh put into .venv is there because nothing else worked, so it comes first. Another BLAS may
# have the name cblas.h (Debian: whichever its alternatives chose), so OpenBLAS's own folder comes before the
# compiler's. CPATH comes last, and must not be in the compiler's environment: gcc searches it before -isystem, and
# a toolkit named there would hide the wrapper of cuda_runtime.h.
# shellcheck shell=bash disable=SC2034

add_include() { # add_include FOLDER: unless it is not there, or searched anyway (and in a better place)
    if [ -d "$1" ] && ! [ "$1" -ef /usr/include ]; then includes+=(-isystem "$1"); fi
}

folder_of() { # folder_of FILE FOLDER...: the first include folder in or under the folders that holds FILE
    local file=$1 root found
    shift
    for root in "$@"; do
        [ -d "$root" ] || continue
        if [ -f "$root/include/$file" ]; then echo "$root/include"; return; fi
        found=$(find -L "$root" -maxdepth 7 -path "*/include/$file" 2>/dev/null | sort | head -n 1)
        if [ -n "$found" ]; then echo "${found%"/$file"}"; return; fi
    done
}

cpu_paths() {
    local root=$1 header folder folders
    includes=(-isystem "$root/dev/cpu/include") blas=(-lopenblas) toolkit=

    if [ -f "$root/.venv/openblas/include/cblas.h" ]; then
        add_include "$root/.venv/openblas/include"
        blas=("-L$root/.venv/openblas/lib" -Xlinker -rpath -Xlinker "$root/.venv/openblas/lib" -lopenblas)
    else
        for header in /usr/include/*/openblas-*/cblas.h /usr/include/openblas*/cblas.h; do
            if [ -f "$header" ]; then add_include "${header%/cblas.h}"; break; fi
        done
    fi
    add_include "$root/build/headers" # xxHash and JSON
    add_include "$root/.venv/include"

    folders=("$root/.venv/cuda-headers" "${CUDA_HOME:-/usr/local/cuda}" "$root"/.venv/lib/python3*/site-packages/nvidia)
    for header in cuda_runtime.h crt/host_config.h nv/target nccl.h cublasLt.h nvtx3/nvToolsExt.h; do
        folder=$(folder_of "$header" "${folders[@]}")
        [ "$header" != cuda_runtime.h ] || toolkit=$folder
        case " ${includes[*]} " in *" $folder "*) ;; *) add_include "$folder" ;; esac
    done

    IFS=: read -r -a folders <<<"${CPATH:-}"
    for folder in "${folders[@]}"; do add_include "${folder:-.}"; done
}
