"""The arithmetic of memory: weights, KV bytes per token, what is left for the KV cache. Pure; everything is
bytes of one rank (one GPU, or one CPU process of an engine) unless it says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.config.machine import GIB, Gpu
from pdserve.config.model_folder import DTYPE_BYTES, ModelFacts

GPU_UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization"""
GPU_FIXED_ALLOWANCE = 3 * GIB // 2
"""CUDA context, NCCL buffers and CUDA graphs, and what the driver keeps of the card"""
CPU_KV_GIB = 1
"""KV space per rank on the CPU where kv-cache-memory-bytes is not set"""
CPU_ENGINE_BYTES = 13 * GIB // 10
"""an engine's own processes on the CPU (FACTS: 625 + 630 MB)"""
CPU_RANK_BYTES = 8 * GIB // 10
"""a rank's process beside weights and KV (FACTS: a worker has 1.8 GB with 1 GiB of KV)"""
FRONTEND_BYTES = 7 * GIB // 10


@dataclass(frozen=True)
class Memory:
    """What one worker's engine will find. An estimate: vLLM measures when it starts."""

    weights: int
    kv_per_token: int
    max_model_len: int
    block_size: int
    allowance: int = 0
    """activations and fixed costs on a GPU"""
    kv_space: int | None = None
    """for the KV cache; negative where not even the weights fit; None: no GPU to measure against"""

    @property
    def blocks(self) -> int:
        return max(0, self.kv_space or 0) // (self.block_size * self.kv_per_token)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len at once, as vLLM counts: whole blocks."""
        return self.blocks / -(-self.max_model_len // self.block_size)


def size(
    model: ModelFacts, args: Mapping[str, object], gpu: Gpu | None, *, cpu_kv: int | None = None
) -> Memory:
    """On the CPU `cpu_kv` is the space for KV. On a GPU, `gpu` is None where there is none to measure
    against."""
    on_cpu = cpu_kv is not None
    ranks = _ranks(args)
    weights = model.weights(model.resolve_dtype(args.get("dtype", "auto"))) // (ranks.tensor * ranks.pipeline)
    allowance = 0 if on_cpu else gpu_allowance(model, args, gpu)
    return Memory(
        weights=weights,
        kv_per_token=kv_bytes_per_token(model, args),
        max_model_len=max_model_len(model, args),
        block_size=block_size(args, on_cpu=on_cpu),
        allowance=allowance,
        kv_space=cpu_kv if on_cpu else _gpu_kv_space(args, gpu, weights + allowance),
    )


def kv_bytes_per_token(model: ModelFacts, args: Mapping[str, object]) -> int:
    """2 (K and V) x layers x (kv_heads / TP) x head_dim x dtype bytes (FACTS); with fewer KV heads than ranks
    each rank holds one. Latent attention stores one entry for all heads, on every rank."""
    ranks = _ranks(args)
    layers = -(-model.layers // ranks.pipeline)
    dtype_bytes = _kv_dtype_bytes(model, args)
    if model.latent:
        return int(layers * model.latent * dtype_bytes)
    return int(2 * layers * max(1, model.kv_heads // ranks.tensor) * model.head_dim * dtype_bytes)


def gpu_allowance(model: ModelFacts, args: Mapping[str, object], gpu: Gpu | None) -> int:
    """The peak of a step of max-num-batched-tokens: residual, attention and MLP buffers, and float32 logits
    of every sequence twice; plus the fixed part. A rule of thumb."""
    tokens, sequences = _batch(args, gpu)
    dtype_bytes = DTYPE_BYTES[model.resolve_dtype(args.get("dtype", "auto"))]
    wide = 6 * model.hidden + 3 * model.intermediate // _ranks(args).tensor
    return GPU_FIXED_ALLOWANCE + tokens * wide * dtype_bytes + sequences * model.vocab * 4 * 2


def block_size(args: Mapping[str, object], *, on_cpu: bool) -> int:
    """vLLM's defaults: 128 on the CPU, 16 on a GPU."""
    return int(str(args.get("block-size", 128 if on_cpu else 16)))


def max_model_len(model: ModelFacts, args: Mapping[str, object]) -> int:
    asked = args.get("max-model-len")
    return asked if isinstance(asked, int) else model.max_len or 4096


@dataclass(frozen=True)
class _Ranks:
    tensor: int
    pipeline: int


def _ranks(args: Mapping[str, object]) -> _Ranks:
    return _Ranks(
        int(str(args.get("tensor-parallel-size", 1))), int(str(args.get("pipeline-parallel-size", 1)))
    )


def _batch(args: Mapping[str, object], gpu: Gpu | None) -> tuple[int, int]:
    """max-num-batched-tokens and max-num-seqs; vLLM's defaults for a server are larger on cards of 70 GiB and
    more."""
    large = gpu is not None and gpu.memory >= 70 * GIB and "A100" not in gpu.name
    tokens, sequences = (8192, 1024) if large else (2048, 256)
    return (
        int(str(args.get("max-num-batched-tokens", tokens))),
        int(str(args.get("max-num-seqs", sequences))),
    )


def _kv_dtype_bytes(model: ModelFacts, args: Mapping[str, object]) -> float:
    kind = str(args.get("kv-cache-dtype", "auto"))
    if kind.startswith(("fp8", "int8")):
        return 1
    if kind.startswith(("int4", "nvfp4", "turboquant", "ultraquant")):
        return 0.5  # about: scales come on top, and turboquant's k8v4 has more
    return DTYPE_BYTES[model.resolve_dtype(args.get("dtype", "auto")) if kind == "auto" else kind]


def _gpu_kv_space(args: Mapping[str, object], gpu: Gpu | None, taken: int) -> int | None:
    explicit = args.get("kv-cache-memory-bytes")
    if isinstance(explicit, int):
        return explicit
    return None if gpu is None else int(gpu.memory * gpu_share(args)) - taken


def gpu_share(args: Mapping[str, object]) -> float:
    """The part of a GPU's memory that an engine may take."""
    return float(str(args.get("gpu-memory-utilization", GPU_UTILIZATION)))
