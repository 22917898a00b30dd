"""Estimates an engine's memory: weights, activations, fixed costs, and what vLLM 0.32 leaves for the KV cache.

Pure. Sizes are bytes of one rank (one GPU, or one CPU process of an engine) unless a text says otherwise. vLLM takes
`CUDA's total x gpu-memory-utilization` and subtracts the memory in use after loading, the peak of a profile run of
max-num-batched-tokens, and its estimate of the CUDA graphs (`gpu_worker.determine_available_memory`). docs/memory.md
compares these terms with logs of real starts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdserve.plan.machine import GIB, MIB, Gpu
from pdserve.plan.model_folder import DTYPE_BYTES, ModelFacts

GPU_UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization."""
GPU_RUNTIME_BYTES = GIB // 4
"""CUDA modules, cuBLAS and FlashInfer workspaces. Logs: 0.24 to 0.26 GiB in vLLM 0.19 to 0.31; 0.05 to 0.25 in 0.7.
vLLM does not count the CUDA context, which exists before its first measurement."""
NVSWITCH_BYTES = 185 * GIB // 100
"""NCCL's additional buffers if NVSwitch joins the ranks. Logs, with GPU_RUNTIME_BYTES: 2.06 to 2.21 GiB on H100 with
TP 2 and 4, 1.39 and 2.10 on A100 with TP 4 and 8, but 0.20 to 0.30 on GPUs joined by PCIe."""
GRAPH_POOL_BYTES = GIB // 5
GRAPH_LAYER_BYTES = 3 * MIB // 20
"""A fit to vLLM's estimate of its CUDA graphs: a pool, and driver memory for each layer of each graph. Logs: 0.26 GiB
for 5 graphs, 0.36 for 16, 0.53 for 86 (28 layers). The fit is too low for 86 graphs of 80 layers: 2.75 GiB in logs."""
CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable in whole GiB, which overrides kv-cache-memory-bytes."""
CPU_KV_GIB = 1
"""GiB of KV space of a rank on the CPU if neither CPU_KV_VARIABLE nor kv-cache-memory-bytes is set."""
CPU_ENGINE_BYTES = GIB
"""A CPU worker's own process and, with several ranks, vLLM's EngineCore (546 and 435 MiB)."""
CPU_RANK_BYTES = 8 * GIB // 10
"""A CPU rank's process without weights and KV (measured: 1.8 GB with 1 GiB of KV)."""
FRONTEND_BYTES = 7 * GIB // 10


@dataclass(frozen=True)
class Memory:
    """Estimated memory of an engine's rank. The engine itself measures it at its start."""

    weights: int
    kv_per_token: int
    max_model_len: int
    block_size: int
    activations: int = 0
    """Peak of a step on a GPU."""
    graphs: int = 0
    runtime: int = 0
    """Buffers of CUDA and NCCL."""
    adapters: int = 0
    """LoRA buffers in the layers."""
    kv_space: int | None = None
    """KV cache. Negative: the rank does not even fit without one. None: unknown, as the GPU is."""

    @property
    def fixed(self) -> int:
        """Memory that does not grow with the batch, without the weights."""
        return self.graphs + self.runtime + self.adapters

    @property
    def blocks(self) -> int:
        return max(0, self.kv_space or 0) // (self.block_size * self.kv_per_token)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def free_tokens(self) -> int:
        """Tokens for requests: vLLM keeps one block as its null block (`BlockPool`)."""
        return max(0, self.tokens - self.block_size)

    @property
    def fits(self) -> bool:
        """Whether there is room for one request of max_model_len."""
        return self.free_tokens >= self.max_model_len

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once; as in vLLM, each takes whole blocks."""
        return self.blocks / -(-self.max_model_len // self.block_size)


def size(
    model: ModelFacts, args: Mapping[str, object], gpu: Gpu | None, *, cpu_kv: int | None = None
) -> Memory:
    """Estimate the memory of an engine's rank. `cpu_kv`: its KV space on the CPU. None: it runs on `gpu`, or on
    an unknown GPU."""
    on_cpu = cpu_kv is not None
    memory = Memory(
        weights=weight_bytes(model, args, on_cpu=on_cpu),
        kv_per_token=kv_bytes_per_token(model, args),
        max_model_len=max_model_len(model, args),
        block_size=block_size(args, on_cpu=on_cpu),
        activations=0 if on_cpu else activation_bytes(model, args, gpu),
        graphs=0 if on_cpu else graph_bytes(model, args, gpu),
        runtime=0 if on_cpu else runtime_bytes(args, gpu),
        adapters=adapter_bytes(model, args),
    )
    if (blocks := args.get("num-gpu-blocks-override")) is not None:
        space: int | None = int(str(blocks)) * memory.block_size * memory.kv_per_token
    else:
        used = memory.weights + memory.activations + memory.fixed
        space = cpu_kv if on_cpu else _gpu_kv_space(args, gpu, used)
    return replace(memory, kv_space=space)


def weight_bytes(model: ModelFacts, args: Mapping[str, object], *, on_cpu: bool) -> int:
    """Return the rank's share of the stored weights. The first and last pipeline stages have an embedding in addition;
    on a GPU there are also the whole rotary table and the loss of torch's allocator."""
    tensor, layers = tensor_size(args), _layers(model, args)
    width, stored = _dtype_bytes(model, args), model.weights(_dtype(model, args))
    embedding = model.vocab * model.hidden * width
    body = stored - embedding * (1 if model.tied else 2)
    if layers < model.layers and body > 0:
        stored = body * layers // model.layers + embedding
    if on_cpu:
        return stored // tensor
    rotary = 0 if model.latent else model.positions * model.head_dim * width
    return stored // tensor + rotary + layers * _allocator_loss(model, tensor, width)


def _allocator_loss(model: ModelFacts, tensor: int, width: int) -> int:
    """Return the bytes that the allocator loses for a layer's four matrices. torch's CUDA allocator rounds 10 MiB and
    more up to a multiple of 2 MiB, and splits off the rest only if that is over 1 MiB
    (c10/cuda/CUDACachingAllocator.cpp). In a 14B model with TP 2, a rank loses 0.17 of 13.95 GiB."""
    if model.latent or model.quantized:
        return 0
    heads, kv_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    inner = model.intermediate // tensor
    rows = ((heads + 2 * kv_heads) * model.head_dim, heads * model.head_dim, 2 * inner, inner)
    matrices = [row * model.hidden * width for row in rows]
    rests = [-matrix % (2 * MIB) for matrix in matrices if matrix >= 10 * MIB]
    return sum(rest for rest in rests if rest <= MIB)


def kv_bytes_per_token(model: ModelFacts, args: Mapping[str, object]) -> int:
    """Return 2 (K and V) x layers x (kv_heads / TP) x head_dim x dtype bytes. With fewer KV heads than ranks each rank
    holds one of them. Latent attention stores one entry for all heads, on every rank."""
    layer_bytes = _layers(model, args) * _kv_dtype_bytes(model, args)
    if model.latent:
        return int(layer_bytes * model.latent)
    return int(2 * layer_bytes * max(1, model.kv_heads // tensor_size(args)) * model.head_dim)


def activation_bytes(model: ModelFacts, args: Mapping[str, object], gpu: Gpu | None) -> int:
    """Return the peak of vLLM's profile run: a layer's MLP at max-num-batched-tokens, or the logits of max-num-seqs
    requests beside the last hidden states, whichever is larger.

    The MLP has gate_up (2 x intermediate / TP), its activation (intermediate / TP) and hidden states. Eager hidden
    states are the layer's input, the residual, the normalized input, the output, and with several ranks the output of
    an all-reduce. Compiled ones are the attention's output (hidden / TP), the residual before and after it, and the
    normalized input. With several ranks, each rank gathers all logits and copies them.
    """
    tokens, sequences = _batch(args, gpu)
    tensor = tensor_size(args)
    copies = 3 + 1 / tensor if _compiled(args) else 4 + (tensor > 1)
    mlp = 3 * model.intermediate / tensor + copies * model.hidden
    logits = model.vocab * (1 if tensor == 1 else 2 + 1 / tensor)
    elements = max(tokens * mlp, tokens * model.hidden + min(sequences, tokens) * logits)
    return int(elements * _dtype_bytes(model, args))


def runtime_bytes(args: Mapping[str, object], gpu: Gpu | None) -> int:
    switched = gpu is not None and re.search(r"A100|[HB][1-3]00", gpu.name) and "PCI" not in gpu.name.upper()
    return GPU_RUNTIME_BYTES + (NVSWITCH_BYTES if tensor_size(args) > 1 and switched else 0)


def graph_bytes(model: ModelFacts, args: Mapping[str, object], gpu: Gpu | None) -> int:
    """Return the size of the CUDA graphs. vLLM captures piecewise graphs for 1, 2, 4 tokens, multiples of 8 up to 256
    and multiples of 16 up to 512, none for more than twice max-num-seqs. It captures full graphs for these sizes up to
    max-num-seqs (`VllmConfig._set_cudagraph_sizes`)."""
    if not _compiled(args):
        return 0
    tokens, sequences = _batch(args, gpu)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    batches: list[int] = [batch for batch in sizes if batch <= tokens]
    count = sum(1 + (batch <= sequences) for batch in batches if batch <= 2 * sequences)
    return GRAPH_POOL_BYTES + count * _layers(model, args) * GRAPH_LAYER_BYTES


def adapter_bytes(model: ModelFacts, args: Mapping[str, object]) -> int:
    """Return the bytes of the LoRA buffers: max-loras x max-lora-rank x (columns + rows) of each matrix of attention,
    MLP and experts. vLLM allocates them even without loaded adapters (`lora/layers`). The tensor-parallel ranks split
    either the rows or the columns; each rank has the whole other side. Embeddings are not counted."""
    if args.get("enable-lora") is not True:
        return 0
    tensor, hidden = tensor_size(args), model.hidden
    heads, inner = model.heads * model.head_dim // tensor, model.intermediate // tensor
    kv = max(1, model.kv_heads // tensor) * model.head_dim
    attention = 3 * hidden + heads + 2 * kv + heads + hidden
    mlp = 2 * hidden + 2 * inner + inner + hidden
    loras, rank = int(str(args.get("max-loras", 1))), int(str(args.get("max-lora-rank", 16)))
    width = DTYPE_BYTES.get(str(args.get("lora-dtype", "auto")), _dtype_bytes(model, args))
    return (
        loras
        * rank
        * _layers(model, args)
        * (attention + mlp + _expert_rows_and_columns(model, args))
        * width
    )


def _expert_rows_and_columns(model: ModelFacts, args: Mapping[str, object]) -> int:
    """Return columns + rows of the matrices (gate, up, down) of a layer's experts on this rank. vLLM allocates
    buffers for each expert, unless lora-target-modules leaves experts out (`lora/layers/fused_moe.py`). An upper
    bound: some layers may have no experts, and gpt-oss has gate and up in one matrix."""
    if "experts" not in str(args.get("lora-target-modules") or "experts"):
        return 0
    tensor, whole = tensor_size(args), args.get("enable-expert-parallel") is True
    experts = -(-model.experts // tensor) if whole else model.experts
    hidden = min(experts, 1) if args.get("enable-moe-shared-loras") is True else experts
    inner = model.expert_intermediate // (1 if whole else tensor)
    return 3 * (hidden * model.hidden + experts * inner)


def block_size(args: Mapping[str, object], *, on_cpu: bool) -> int:
    """Return the tokens of a KV block; vLLM's default is 128 on the CPU and 16 on a GPU."""
    return int(str(args.get("block-size", 128 if on_cpu else 16)))


def max_model_len(model: ModelFacts, args: Mapping[str, object]) -> int:
    asked = args.get("max-model-len")
    return asked if isinstance(asked, int) else model.max_len or 4096


def tensor_size(args: Mapping[str, object]) -> int:
    return int(str(args.get("tensor-parallel-size", 1)))


def _layers(model: ModelFacts, args: Mapping[str, object]) -> int:
    """Return the layers of the largest pipeline stage."""
    return -(-model.layers // int(str(args.get("pipeline-parallel-size", 1))))


def _compiled(args: Mapping[str, object]) -> bool:
    """Whether vLLM uses torch.compile and CUDA graphs, its default."""
    return args.get("enforce-eager") is not True


def _batch(args: Mapping[str, object], gpu: Gpu | None) -> tuple[int, int]:
    """Return max-num-batched-tokens and max-num-seqs. vLLM's server has larger defaults on GPUs of 70 GiB and more, but
    not on the A100 (`EngineArgs.get_batch_defaults`)."""
    memory = gpu.memory if gpu is not None and "A100" not in gpu.name else 0
    tokens = 16384 if memory >= 160 * GIB else 8192 if memory >= 70 * GIB else 2048
    return (
        int(str(args.get("max-num-batched-tokens", tokens))),
        int(str(args.get("max-num-seqs", 1024 if memory >= 70 * GIB else 256))),
    )


def _dtype(model: ModelFacts, args: Mapping[str, object]) -> str:
    return model.resolve_dtype(args.get("dtype", "auto"))


def _dtype_bytes(model: ModelFacts, args: Mapping[str, object]) -> int:
    return DTYPE_BYTES[_dtype(model, args)]


def _kv_dtype_bytes(model: ModelFacts, args: Mapping[str, object]) -> float:
    kind = str(args.get("kv-cache-dtype", "auto"))
    if kind.startswith(("fp8", "int8")):
        return 1
    if kind.startswith(("int4", "nvfp4", "turboquant", "ultraquant")):
        return 0.5  # approximate: without scales, and turboquant's k8v4 takes more
    return _dtype_bytes(model, args) if kind == "auto" else DTYPE_BYTES[kind]


def _gpu_kv_space(args: Mapping[str, object], gpu: Gpu | None, used: int) -> int | None:
    explicit = args.get("kv-cache-memory-bytes")
    if isinstance(explicit, int):
        return explicit
    return None if gpu is None else int(gpu.memory * gpu_share(args)) - used


def cpu_kv_bytes(args: Mapping[str, object], env: Mapping[str, str]) -> int:
    """Return the KV space of each rank on the CPU."""
    space, explicit = env.get(CPU_KV_VARIABLE), args.get("kv-cache-memory-bytes")
    if space:  # the plan reports a value that is no number
        return ((space.isdecimal() and int(space)) or CPU_KV_GIB) * GIB
    return explicit if isinstance(explicit, int) else CPU_KV_GIB * GIB


def gpu_share(args: Mapping[str, object]) -> float:
    """Return the share of a GPU's memory that an engine may use."""
    return float(str(args.get("gpu-memory-utilization", GPU_UTILIZATION)))
