#!/usr/bin/env bash
# Resolve the locks again: `make lock`. Linux x86-64, Python 3.11 (the pins fit 3.12 and 3.13 too, and aarch64).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
locks=pdserve/install
export UV_CUSTOM_COMPILE_COMMAND="make lock"
compile() { "$uv" pip compile --quiet --no-annotate --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 "$@"; }

# torch 2.13.0+cpu is not on PyPI: a wheel folder or PyTorch's index must have it. The GPU build must use neither:
# its `torch==2.13.0` would resolve to the CPU wheel.
torch=(--index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
[ -n "${PIP_FIND_LINKS:-}" ] && torch=(--find-links "$PIP_FIND_LINKS")
compile pyproject.toml --extra cpu --override requirements/leave-out-cpu.txt "${torch[@]}" -o $locks/cpu.txt
sed -i 's/^intel-[a-z-]*==[0-9.]*$/& ; platform_machine == "x86_64"/' $locks/cpu.txt # torch's, which aarch64 has not
# Frontends of simulated engines: the same without what only engines import.
left_out=$(grep -v '^#' requirements/leave-out-simulated.txt | paste -sd '|')
grep -vE "^($left_out)==" $locks/cpu.txt > $locks/simulated.txt

# The GPU build uses the CPU build's versions where possible, so that both behave alike and dev.txt fits both.
shared=$(mktemp)
trap 'rm -f "$shared"' EXIT
grep -vE '^(torch|triton|apache-tvm-ffi)==' $locks/cpu.txt > "$shared"
compile pyproject.toml --extra cuda -c "$shared" -o $locks/gpu.txt
compile requirements/dev.in -c "$shared" -o requirements/dev.txt
