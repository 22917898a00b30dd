"""pdserve's replacements of vLLM's CPU functions, without an engine: verification of drafts, LoRA kernels."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from pdserve.engine.vllm.cpu_faults import leave_out_adapters, verify_drafts

pytestmark = pytest.mark.filterwarnings("ignore")
VOCABULARY = 10
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
"""where the drafts of three requests end"""


@dataclass
class Sampling:
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor | None = None
    all_greedy: bool = False


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    for name in ("expand_batch_to_tokens", "apply_sampling_constraints", "_rejection_random_sample"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    verify_drafts()


def constrained(temperatures: list[float], top_k: list[int], logits: torch.Tensor, ends: torch.Tensor) -> Any:
    sampling = Sampling(torch.tensor(temperatures), torch.tensor(top_k, dtype=torch.int32))
    return rejection_sampler.apply_sampling_constraints(logits, ends, sampling)


def test_each_draft_has_the_parameters_of_its_request() -> None:
    logits = torch.arange(4.0 * VOCABULARY).view(4, VOCABULARY)
    found = constrained([0.5, 1.0, 0.0], [1, 5, 3], logits.clone(), ENDS)
    assert torch.isfinite(found).sum(dim=1).tolist() == [1, 1, 3, 3]
    assert found[:, -1].tolist() == [18.0, 38.0, 29.0, 39.0], "divided by the temperature, unless greedy"


def test_a_placeholder_is_rejected() -> None:
    """Index -1 would read the memory before the probabilities. The values there would accept the placeholder."""
    memory = torch.full((2 * VOCABULARY,), 100.0)
    probabilities = memory[VOCABULARY:].view(1, VOCABULARY)
    tokens = torch.full((1, 2), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        tokens,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([-1], dtype=torch.int32),
        None,
        probabilities,
        torch.tensor([[7]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([False]),
        1,
        None,
    )
    assert tokens.tolist() == [[3, -1]]


@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "prompts"])
def test_tokens_without_an_adapter_are_unchanged(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three tokens has the adapter in the last of two slots. The others have no adapter."""
    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))
    leave_out_adapters()
    punica = punica_cpu.PunicaWrapperCPU(8, 4, "cpu")
    punica.is_prefill, punica.no_lora = whole, False
    punica._token_lora_indices[:3] = torch.tensor([-1, 1, -1])
    punica.indices_len[0] = 3
    punica._update_prefill_metadata(punica.token_lora_indices)
    outputs = torch.full((3, 2), 7.0)
    weights = torch.ones(2, 1, 4, 2), torch.ones(2, 1, 2, 4)
    punica.add_lora_linear(outputs, torch.ones(3, 2), (weights[0],), (weights[1],), 1.0, (2,))
    assert outputs.tolist() == [[7.0, 7.0], [15.0, 15.0], [7.0, 7.0]]
