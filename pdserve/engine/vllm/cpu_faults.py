"""Works around faults of vLLM 0.32, most of them on the CPU. Check each when vLLM is upgraded (`tools/vllm_diff.py`
shows whether the code around it changed). By November 2026, none of them had been reported to vLLM.

The list has each function, the fault that it works around, and when the function is no longer needed ("goes").

- `keep_generators`: a request with a seed whose prompt takes several steps ends the engine. Also seen by
  RBLN-SW/vllm-rbln#1025. Unchanged in 0.33; goes when `_bookkeeping_sync` does not change generators that lack an
  offset.
- `rank_without_compiler`: the first request for logprobs compiles for 10 s, in which the engine stalls. Also seen by
  torch-spyre/sendnn-inference#550. Unchanged in 0.33; goes when CPU engines compile it at start or never.
- `verify_drafts`: three faults of speculative decoding. Requests that sample get uninitialized temperatures, top_k and
  top_p; a step without drafts ends the engine; a draft of -1 reads memory outside of a tensor. Goes when
  `apply_top_k_only` accepts an empty batch, and vLLM's `cpu_triton_utils` copies back what `expand_kernel_impl` writes
  and rejects drafts of -1.
- `leave_out_adapters`: tokens without a LoRA adapter are computed with the adapter in the last slot. Goes when
  `torch_ops/lora_ops.py` leaves out rows whose index is -1.
- `request_amx`: on a CPU with AMX, a decode step before the first prefill ends in SIGILL. Goes when vLLM's CPU worker
  asks for the tiles itself.
- `api.keep_images`, on GPUs, too: a preempted request ends the engine, because its ranks did not get the images whose
  KV was cached. Goes when `strip_covered_mm_data` leaves the images that a preempted request needs again.
- `api.compute_in_core`: an engine of one rank computes in a second process, and both processes spin. By design; goes
  when a CPU engine with one rank has the executor `uni`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.ops import logprobs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def work_around() -> None:
    """Call it in each worker process on the CPU, before the worker is made."""
    request_amx()
    keep_generators(CPUModelRunner)
    rank_without_compiler()
    verify_drafts()
    leave_out_adapters()


def request_amx() -> None:
    """Ask Linux for AMX tiles, for this process and its forked children, because using them without permission ends a
    process. vLLM's attention uses them for bfloat16, but only oneDNN asks for them, at the first prefill."""
    torch.cpu._init_amx()


def rank_without_compiler() -> None:
    """Use the plain function behind the compiled one. With TORCHDYNAMO_DISABLE=1 there is only the plain one."""
    ranks = logprobs.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(ranks, "__wrapped__", ranks)


def verify_drafts() -> None:
    """Repeat each request's parameters for its drafts in torch, because vLLM's CPU kernel writes them into a copy that
    is dropped. Skip the constraints in a step without drafts. Reject drafts of -1, with which vLLM pads the first step
    of a request whose KV was read, because the CPU kernel would read their probability outside of the tensor."""
    constrain = rejection_sampler.apply_sampling_constraints
    verify = rejection_sampler._rejection_random_sample

    def expand(values: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        repeated = values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=count)
        return repeated.masked_fill(repeated == replace_from, replace_to)

    def constrained(logits: Any, *args: Any) -> Any:
        return constrain(logits, *args) if len(logits) else logits

    def verified(tokens: Any, ends: Any, drafts: Any, *args: Any) -> Any:
        *others, uniform, greedy, longest, rates = args
        uniform = uniform.masked_fill(drafts < 0, torch.inf)
        return verify(tokens, ends, drafts.clamp(min=0), *others, uniform, greedy, longest, rates)

    verified.register_warmup = verify.register_warmup  # type: ignore[attr-defined]
    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrained
    rejection_sampler._rejection_random_sample = verified


def leave_out_adapters() -> None:
    """Add nothing to tokens without an adapter. Their index is -1, with which vLLM uses the weights of the last slot.
    The kernels of whole prompts (sgmv) call those of tokens (bgmv)."""

    def without(kernel: Callable[..., None]) -> Callable[..., None]:
        def masked(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **named: Any) -> None:
            kernel(
                inputs.masked_fill((indices < 0).unsqueeze(1), 0), weights, output, indices, *args, **named
            )

        return masked

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        kernel = without(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, kernel)


def keep_generators(runner: type) -> None:
    """In each step of a prompt but the last, vLLM samples a token and discards it. It then rewinds the generator of a
    request with a seed, which CPU generators cannot do, and the error ends the engine. So the shared generator samples
    such tokens."""

    def without(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **named: Any) -> Any:
            with _discarding(self):
                return method(self, *args, **named)

        return wrapped

    for name in ("_sample", "_bookkeeping_sync"):
        setattr(runner, name, without(getattr(runner, name)))


@contextmanager
def _discarding(runner: Any) -> Iterator[None]:
    """Hide the generators of requests whose prompts continue in the next step."""
    batch = runner.input_batch
    discarded = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    kept = {row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)
