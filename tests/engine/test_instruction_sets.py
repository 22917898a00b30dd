"""How the CPU's instruction sets are named. That each worker process asks for AMX is tested on real engines
(`test_vllm_engine.py`)."""

import pytest
import torch

from pdserve.engine.vllm import instruction_sets

EPYC = {"avx2": True, "avx512_bf16": True, "amx_tile": False, "amx_bf16": False, "cpu_name": "AMD EPYC"}
XEON = EPYC | {"amx_tile": True, "amx_bf16": True}


@pytest.mark.parametrize(
    ("features", "permitted", "text"),
    [
        (EPYC, False, "AVX512 (avx512_bf16), no AMX"),
        (XEON, True, "AVX512 (avx512_bf16, amx_bf16), AMX tiles permitted"),
        (XEON, False, "AVX512 (avx512_bf16, amx_bf16), AMX tiles forbidden by Linux"),
        ({"avx2": True}, False, "AVX512"),
    ],
)
def test_instruction_sets_are_named(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, object], permitted: bool, text: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: permitted)
    assert instruction_sets.describe(instruction_sets.request_amx()) == text
