"""Which of the CPU's instruction sets an engine computes with, and the permission that one of them needs.

Linux kills a process with SIGILL that touches AMX tiles without having asked for them. vLLM 0.32 never asks, though its
attention on the CPU uses tiles for bfloat16; oneDNN does so by the way, at the first prefill, which on a decode worker
may come after the first decode step. The permission belongs to the process: forked children inherit it, others do not.
"""

from typing import Any

import torch

_TOLD = ("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_fp16")
"""beyond the generation: what makes a difference of several times to a model's matrices"""


FORBIDDEN = "AMX tiles forbidden by Linux"
"""what no engine in bfloat16 survives on such a CPU"""


def request_amx() -> bool:
    """Ask Linux for AMX tiles, for this process and the children that it forks; does nothing on a CPU without.
    True where they may be used."""
    return bool(torch.cpu._init_amx())


def describe(amx_permitted: bool) -> str:
    """Such as `AVX512 (avx512_bf16, avx512_vnni), no AMX`."""
    features: dict[str, Any] = torch.cpu.get_capabilities()
    found = [name for name in _TOLD if features.get(name)]
    generation = torch.backends.cpu.get_cpu_capability()
    return f"{generation} ({', '.join(found)}), {_amx(features, amx_permitted)}" if found else generation


def _amx(features: dict[str, Any], permitted: bool) -> str:
    if not features.get("amx_tile"):
        return "no AMX"
    return "AMX tiles permitted" if permitted else FORBIDDEN
