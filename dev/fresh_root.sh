#!/usr/bin/env bash
# dev/fresh_root.sh COMMAND... - runs a command as a new user would: in a clone of this checkout's last commit, on a
# Debian that has little more than what the README asks for, with a clean environment. Returns the command's exit code.
#
# The root holds git, make, g++, python3 and ca-certificates, and as a trap libblas-dev, whose cblas.h is not
# OpenBLAS's. debootstrap makes it once, and it is kept as a tarball. Each run unpacks it, mounts /proc, /sys and
# /dev/shm anew and removes it at the end. What the network needs goes along: variables PIP_* and *_proxy, resolv.conf,
# hosts, pip.conf, the certificates and folders that these name, apt's settings for downloads. Nothing else does.
#
#   FRESH_ROOT_CACHE    a folder (~/.cache/llmc_zero-fresh-root) for the root while it is used, its tarball, and the
#                       archives of Debian and PyPI: for a month a second run downloads nothing. One run at a time
#                       uses it, the next one waits
#   FRESH_ROOT_MIRROR   Debian's archive (the one that this host uses, else http://deb.debian.org/debian)
#
# It takes root. If there is no tarball yet and the archive cannot be reached in three tries, the command runs on this
# host, and the last line says so. Any other reason why there is no root is an error, with exit code 125.
#
# The host's files are safe because everything is mounted in a mount namespace of its own: where the root is removed,
# nothing was ever mounted in it, whatever has become of the processes inside. These have a process namespace, and end
# with it. What is put into the root is put there from inside: no link leads out.
set -euo pipefail
umask 022
suite=bookworm
packages=git,make,g++,python3,ca-certificates,libblas-dev
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { echo "fresh_root: $*" >&2; }
die() { say "$*"; exit 125; }
have() { command -v "$1" >/dev/null 2>&1; }

# ---- inside the namespaces -----------------------------------------------------------------------------------

# fresh_root.sh --inside ROOT CACHE FOLDER... -- ENV...: mounts, then runs `env -i ENV...`. Process 1 of its namespace:
# it stays, to wait for what others leave behind. It ends with the mounts.
if [[ ${1:-} == --inside ]]; then
    root=$2 cache=$3
    shift 3
    bind() {   # bind FOLDER PLACE [OPTION]
        local place
        chroot "$root" mkdir -p "$2"
        place=$root$(chroot "$root" realpath "$2")
        mount --bind "$1" "$place"
        mount -o "remount,bind,nosuid,nodev${3:+,$3}" "$place"
    }
    set -E
    trap 'exit 125' ERR
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
    mkdir -p "$root/dev/shm"
    mount -t tmpfs -o nosuid,nodev,mode=1777 shm "$root/dev/shm"
    bind "$cache/archives" /var/cache/apt/archives
    bind "$cache/wheels" /var/cache/llmc_zero-wheels
    while [[ $1 != -- ]]; do bind "$1" "$1" ro; shift; done
    chroot "$root" sh -c ': </dev/zero' || die "no devices or programs in $cache: set FRESH_ROOT_CACHE"
    trap - ERR
    code=0
    chroot "$root" env -i "${@:2}" || code=$?
    exit "$code"
fi

# ---- what goes along -----------------------------------------------------------------------------------------

network=() files=() folders=() pip_conf=""
find_network() {   # sets `network` (variables), `files` and `folders` (to be there under the same names), `pip_conf`
    local name value
    for name in $(compgen -e | grep -iE '^(PIP_.*|[a-z]+_proxy)$'); do
        network+=("$name=${!name}")
    done
    for name in "${HOME:-/root}"/.pip/pip.conf "${HOME:-/root}"/.config/pip/pip.conf; do
        [[ ! -f $name ]] || pip_conf=$name
    done
    files=(/etc/resolv.conf /etc/hosts)
    for name in /etc/pip.conf "${PIP_CONFIG_FILE:-}"; do [[ ! -f $name ]] || files+=("$name"); done
    for name in ${PIP_CERT:-} ${PIP_CLIENT_CERT:-} ${PIP_FIND_LINKS:-} ${PIP_CONSTRAINT:-} \
        $(sed -nE 's/^ *(cert|client-cert|find-links|constraint) *= *//p' /dev/null "${files[@]:2}" ${pip_conf:+"$pip_conf"}) \
        $(sed -nE 's/^Acquire::https.*"(\/.*)";/\1/p' "$work/apt.conf"); do
        value=${name#file://}
        [[ $value == /* ]] || continue
        if [[ -f $value ]]; then files+=("$value"); elif [[ -d $value ]]; then folders+=("$value"); fi
    done
}
apt_settings() {   # how this host's apt downloads
    ! have apt-config || apt-config dump | grep -E '^Acquire::(https?::|Check-|Retries|ForceIPv)' || true
}
find_mirror() {
    mirror=${FRESH_ROOT_MIRROR:-}
    [[ -n $mirror ]] || mirror=$(grep -rhoE 'https?://[^] ]*/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d \
        --include='*.list' --include='*.sources' 2>/dev/null | head -n 1 | tr -d ' ') || true
    mirror=${mirror:-http://deb.debian.org/debian}
    [[ -n ${http_proxy:-} ]] || ! have apt-config || eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
    [[ -z ${http_proxy:-} ]] || export http_proxy
}
reach() {   # whether the archive can be reached, in three tries
    local try file="$mirror/dists/$suite/InRelease"
    for try in 1 2 3; do
        if have wget; then wget -q -t 1 -T 30 -O /dev/null "$file"
        elif have curl; then curl -fsSL -m 60 -o /dev/null "$file"
        else /usr/lib/apt/apt-helper -qq download-file "$file" "$work/InRelease"; fi && return
        sleep $((try * 3))
    done
    return 1
}
three_times() {   # three_times COMMAND...: until it succeeds
    "$@" || { say "again: $1"; sleep 5; "$@"; } || { say "once more: $1"; sleep 20; "$@"; }
}

# ---- namespaces ----------------------------------------------------------------------------------------------

spaces=(--mount --pid --fork --kill-child --mount-proc) child=""
isolated() {   # runs a command with mounts and processes of its own, all of which end when it does, or we do
    local code=0
    setpriv --pdeathsig KILL unshare "${spaces[@]}" -- "$@" <&0 9>&- &
    child=$!
    wait "$child" || code=$?
    child=""
    return "$code"
}
stop() {   # ends the first process of the namespace; unshare returns once all others have ended with it
    trap '' INT TERM HUP
    local status
    if [[ -n $child ]]; then
        while read -r status; do kill -KILL "$(basename "${status%/status}")" 2>/dev/null || true; done \
            < <(grep -lsE "^PPid:[[:space:]]+$child\$" /proc/[0-9]*/status)
        wait "$child" || true
    fi
    exit "$1"
}
remove() {   # remove FOLDER: of ours, and not if something is mounted in it after all
    [[ -d $1 ]] || return 0
    if grep -F " $1" /proc/self/mountinfo >/dev/null; then say "$1 stays: something is mounted there"; return; fi
    rm -rf --one-file-system -- "$1"
}

# ---- the root ------------------------------------------------------------------------------------------------

get_debootstrap() {
    ! have debootstrap || return 0
    have apt-get || die "debootstrap is needed, and apt-get is not here to install it"
    say "apt-get install debootstrap"
    local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -qq)
    "${quiet[@]}" update || true
    "${quiet[@]}" install -y --no-install-recommends debootstrap debian-archive-keyring >/dev/null
}
bootstrap() {
    local clean=(env -i "PATH=$path" HOME=/root "${network[@]}" ${http_proxy:+"http_proxy=$http_proxy"})
    {
        remove "$root" && mkdir "$root" &&
            isolated "${clean[@]}" debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" &&
            isolated chroot "$root" sh -c 'cat >/etc/apt/apt.conf.d/90download' <"$work/apt.conf" &&
            isolated "${clean[@]}" chroot "$root" apt-get -qq update
    } >"$work/log" 2>&1 && return
    tail -n 5 "$work/log" >&2
    return 1
}
make_root() {   # leaves the tarball; returns 1 if there is none and the archive cannot be reached
    [[ -z $(find "$tarball" -mtime -30 2>/dev/null) ]] || return 0
    reach || { [[ -e $tarball ]]; return; }
    three_times get_debootstrap || { reach || return 1; die "debootstrap cannot be installed"; }
    say "a root by debootstrap $suite, from $mirror"
    three_times bootstrap || { reach || return 1; die "debootstrap cannot make a root"; }
    if ! tar -C "$root" --one-file-system --exclude='./var/cache/apt/archives/*.deb' -cf "$tarball.part" . ||
        ! mv "$tarball.part" "$tarball"; then die "the root cannot be kept in $cache"; fi
    rm -f "$cache"/archives/*.deb "$cache"/wheels/*   # of the last month
    remove "$root"
    say "made in $SECONDS s: $tarball"
}
clone() {   # clone FOLDER: no setting of this host's git has a say in it
    printf '[safe]\n\tdirectory = *\n' >"$work/gitconfig"
    env -i "PATH=$path" "HOME=$work" "GIT_CONFIG_GLOBAL=$work/gitconfig" GIT_CONFIG_NOSYSTEM=1 \
        git clone -q --no-hardlinks "$top" "$1" || die "git could not clone $top"
    [[ -z $(git -c safe.directory='*' -C "$top" status --porcelain 2>/dev/null) ]] || say "what is not committed is not in the clone"
}

run_in_root() {
    set -E
    trap 'exit 125' ERR
    mkdir "$root"
    tar -C "$root" --numeric-owner -xpf "$tarball"
    tar -C / -chf "$work/files.tar" "${files[@]#/}"
    isolated chroot "$root" tar -C / -xf - <"$work/files.tar"
    [[ -z $pip_conf ]] ||
        isolated chroot "$root" sh -c 'mkdir -p /root/.config/pip && cat >/root/.config/pip/pip.conf' <"$pip_conf"
    clone "$root/root/llmc_zero"
    trap - ERR
    isolated "${BASH_SOURCE[0]}" --inside "$root" "$cache" "${folders[@]}" -- "PATH=$path" HOME=/root USER=root \
        LOGNAME=root SHELL=/bin/bash LLMC_ZERO_WHEELS=/var/cache/llmc_zero-wheels "${network[@]}" \
        sh -c 'cd /root/llmc_zero && exec "$@"' sh "$@"
}
run_on_host() {
    local code=0
    clone "$work/llmc_zero"
    # shellcheck disable=SC2016
    env -i "PATH=$path" "HOME=${HOME:-/root}" "${network[@]}" sh -c 'cd "$0" && exec "$@"' "$work/llmc_zero" "$@" || code=$?
    say "ATTENTION: NOT IN A FRESH ROOT. $mirror could not be reached, so this ran on the host, whose packages may hide faults."
    return "$code"
}

[[ $# -gt 0 ]] || { echo "usage: dev/fresh_root.sh COMMAND..." >&2; exit 125; }
[[ $(id -u) == 0 ]] || die "only root can make a root (debootstrap, chroot, mount)"
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${FRESH_ROOT_CACHE:-${HOME:-/root}/.cache/llmc_zero-fresh-root}
mkdir -p "$cache"/{archives/partial,wheels}
cache=$(cd "$cache" && pwd -P)
exec 9>"$cache/lock"
flock -n 9 || { say "waits for another run"; flock 9; }
work=$cache/run root=$cache/run/root
remove "$work"   # of a run that was killed
mkdir "$work" || exit 125
trap 'remove "$work"' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
# In a chroot / is no mount, whose propagation could be changed.
isolated true 2>/dev/null || spaces+=(--propagation unchanged)
isolated true || die "no namespaces here (CAP_SYS_ADMIN): a container must be started with --privileged"
apt_settings >"$work/apt.conf"
find_network
find_mirror
tarball=$cache/$suite-$(echo "$packages $mirror" | cat - "$work/apt.conf" | cksum | cut -d ' ' -f 1).tar
if make_root; then run_in_root "$@"; else run_on_host "$@"; fi
