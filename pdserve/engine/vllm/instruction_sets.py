"""Which of the CPU's instruction sets an engine computes with, and the permission that one of them needs.

Linux kills a process with SIGILL that touches AMX tiles without having asked for them. vLLM 0.32 never asks, though its
attention on the CPU uses tiles for bfloat16; oneDNN does so by the way, at the first prefill, which on a decode worker
may come after the first decode step. The permission belongs to the process: forked children inherit it, others do not.
"""

from typing import Any

import torch

FORBIDDEN = "AMX tiles forbidden by Linux"
"""what no engine in bfloat16 survives on such a CPU"""
_SHOWN = ("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_fp16")
"""beyond the generation: what makes a difference of several times to a model's matrices"""


def request_amx() -> bool:
    """Ask Linux for AMX tiles, for this process and the children that it forks; do nothing on a CPU without them. True
    where they may be used."""
    return bool(torch.cpu._init_amx())


def describe(amx_permitted: bool) -> str:
    """Such as `AVX512 (avx512_bf16, avx512_vnni), no AMX`."""
    features: dict[str, Any] = torch.cpu.get_capabilities()
    found = [name for name in _SHOWN if features.get(name)]
    generation: str = torch.backends.cpu.get_cpu_capability()
    if not found:
        return generation
    permission = "AMX tiles permitted" if amx_permitted else FORBIDDEN
    amx = permission if features.get("amx_tile") else "no AMX"
    return f"{generation} ({', '.join(found)}), {amx}"
