#!/usr/bin/env bash
# Install the pinned packages of this machine's platform and pdserve itself into .venv. `make install` runs it.
#
#   deploy/install.sh [dev]
#
# PLATFORM=cpu|gpu  the build (default: gpu where an NVIDIA GPU is found)
# PYTHON=python3.12 the interpreter, 3.11 to 3.13 (default: python3)
# VENV=.venv        the virtual environment
#
# pip's own settings (index-url, extra-index-url, find-links, from its files or PIP_*) are honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
uv_version=0.13.8
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "pdserve: $*" >&2; }
die() { say "$*"; exit 1; }

find_platform() {
    if [ -n "${PLATFORM:-}" ]; then
        echo "$PLATFORM"
    elif [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo gpu
    else
        echo cpu
    fi
}

# A digest of what the environment is made from: while it is unchanged, there is nothing to install.
fingerprint() { { echo "$platform $uv_version $PWD"; cat pyproject.toml "$@"; } | sha256sum | cut -d' ' -f1; }

make_venv() {
    command -v "$python" >/dev/null || die "no $python here: install Python 3.11, 3.12 or 3.13, or name one with PYTHON=…"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        die "$("$python" --version 2>&1) is not 3.11, 3.12 or 3.13: name one with PYTHON=python3.12"
    "$python" -m venv "$venv" || die "could not make $venv (on Debian and Ubuntu: apt install python3-venv)"
}

# uv installs ten times faster than pip, but does not read pip's settings: pass them on.
pip_settings() {
    "$venv/bin/python" -m pip config list | sed -n "s/\\\\n/ /g; s/^[^=]*\.\(find-links\|index-url\|extra-index-url\)='\(.*\)'$/\1 \2/p" |
        while read -r option values; do
            for value in $values; do echo "--$option=$value"; done
        done | sort -u
}

# Drop uv's lines per package from its output.
install() { "$venv/bin/uv" pip install --python "$venv/bin/python" "$@" 2> >(grep --line-buffered -v '^ [+~-] ' >&2); }

install_packages() {
    local sources
    mapfile -t sources < <(pip_settings)
    sources+=(--index-strategy unsafe-best-match) # as pip does: the best of all sources
    if [ "$platform" = gpu ]; then
        # A wheel folder may hold torch 2.13.0+cpu, which would satisfy the GPU lock's torch==2.13.0.
        mapfile -t sources < <(printf '%s\n' "${sources[@]}" | grep -v '^--find-links=')
    elif ! install --quiet --dry-run --no-deps "${sources[@]}" "$(grep '^torch==' "${locks[0]}")" 2>/dev/null; then
        say "torch's CPU build is in no configured source: adding $torch_index"
        sources+=("--extra-index-url=$torch_index")
    fi
    # --no-deps: the locks are complete, and the CPU lock leaves out four packages (requirements/leave-out-cpu.txt).
    # --compile-bytecode: otherwise nine processes compile the same thousands of files at the first start, and at
    # every start where PYTHONDONTWRITEBYTECODE is set, as in many containers.
    install --no-deps --compile-bytecode "${sources[@]}" "${locks[@]/#/--requirements=}"
    install --no-deps --no-build-isolation --quiet --editable .
}

platform=$(find_platform)
locks=("requirements/$platform.txt")
[ -f "${locks[0]}" ] || die "PLATFORM is cpu or gpu, not '$platform'"
stamp="$venv/.pdserve-installed"
if [ "${1:-}" = dev ]; then
    locks+=(requirements/dev.txt)
    stamp="$venv/.pdserve-installed-dev"
fi
[ "${1:-}" != dev ] || deploy/test-tools.sh || say "some tools for tests could not be installed"
[ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "${locks[@]}")" ] && exit 0

started=$SECONDS
case $platform in
    cpu) say "CPU build (no NVIDIA GPU found, or PLATFORM=cpu): about 0.9 GB to download, 2.6 GB on disk" ;;
    gpu) say "GPU build (CUDA 13, NVIDIA driver 580 or newer): about 9 GB on disk" ;;
esac
[ -x "$venv/bin/python" ] || make_venv
rm -f "$venv"/.pdserve-installed*
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
[ "$("$venv/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" = $uv_version ] ||
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "uv==$uv_version"
install_packages
fingerprint "${locks[0]}" > "$venv/.pdserve-installed"
fingerprint "${locks[@]}" > "$stamp"
say "installed into $venv in $((SECONDS - started)) s"
