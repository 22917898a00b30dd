"""Which of the CPU's instruction sets an engine computes with, and the permission that AMX needs.

Linux kills a process with SIGILL that touches AMX tiles without permission. vLLM 0.32 never asks for it, though its
attention on the CPU uses tiles for bfloat16. oneDNN asks at the first prefill, which on a decode worker may come after
the first decode step. The permission belongs to the process; only forked children inherit it.
"""

from typing import Any

import torch

FORBIDDEN = "AMX tiles forbidden by Linux"
"""an engine in bfloat16 dies on such a CPU"""
_SHOWN = ("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_fp16")
"""extensions that make a model's matrices several times faster"""


def request_amx() -> bool:
    """Ask Linux for AMX tiles, for this process and the children that it forks. Return whether they may be used; false
    on a CPU without them."""
    return bool(torch.cpu._init_amx())


def describe(amx_permitted: bool) -> str:
    """Such as `AVX512 (avx512_bf16, avx512_vnni), no AMX`."""
    features: dict[str, Any] = torch.cpu.get_capabilities()
    present = [name for name in _SHOWN if features.get(name)]
    generation: str = torch.backends.cpu.get_cpu_capability()
    if not present:
        return generation
    permission = "AMX tiles permitted" if amx_permitted else FORBIDDEN
    amx = permission if features.get("amx_tile") else "no AMX"
    return f"{generation} ({', '.join(present)}), {amx}"
