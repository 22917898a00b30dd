"""Plans a graph: what would run where, and whether it fits. Loads no weights and starts nothing."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pdserve.config.engine_args.arguments import draft_model
from pdserve.config.engine_args.installed import VLLM_VERSION, find_folder, installed_vllm
from pdserve.config.schema import Config, DecodeConfig, WorkerConfig
from pdserve.contract.records import Role
from pdserve.plan import checks
from pdserve.plan.explain import explain
from pdserve.plan.machine import Machine
from pdserve.plan.memory import GPU_UTILIZATION, Memory, cpu_kv_bytes, size
from pdserve.plan.model_folder import ModelFacts, read_model
from pdserve.plan.slots import (
    PlannedWorker,
    Selection,
    Slot,
    frontend_slots,
    gpus_needed,
    place_workers,
    smallest_gpu,
    start_commands,
    worker_config,
)
from pdserve.util.errors import ConfigError
from pdserve.util.net import is_loopback

DECODE_CHUNK = 256
"""Default of the maximum of a chunk's tokens in a decode worker (docs/decisions/0025-adaptive.md)."""
UNCOUNTED = ("cpu-offload-gb", "offload-group-size", "quantization")
"""Arguments that change an engine's memory in ways that `memory.py` does not estimate."""
_UNREACHED = (
    "The API listens on {} inside this container, where published ports (docker run -p) do not reach it: set "
    "PDSERVE_FRONTEND_HOST=0.0.0.0, PDSERVE_API_KEYS and PDSERVE_ALLOW=plain-http, or a certificate."
)
W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True)
class Plan:
    config: Config
    """with this machine's defaults; roles start with this configuration, not with the loaded one"""
    machine: Machine
    workers: tuple[PlannedWorker, ...]
    """decode workers first"""
    frontends: tuple[Slot, ...]
    problems: tuple[str, ...] = ()
    """why `serve` refuses the graph, in full sentences that say what to do"""
    unknown: str = ""
    """why it is unknown whether the engines' memory fits, as a full sentence; else empty"""
    notes: tuple[str, ...] = ()
    explained: tuple[str, ...] = ()
    """how pdserve serves a model of this kind, in full sentences"""

    @property
    def fits(self) -> bool | None:
        """Whether `serve` would start the graph; None: unknown."""
        return False if self.problems else None if self.unknown else True

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All processes, frontends last."""
        return (*(worker.slot for worker in self.workers), *self.frontends)


def make_plan(
    config: Config,
    machine: Machine,
    roles: Collection[Role] | None = None,
    index: int | None = None,
    env: Mapping[str, str] = os.environ,
    node: int | None = None,
) -> Plan:
    """Plan the graph, or with `roles`, `index` and `node` a part of it. A part keeps its KV ports of the whole graph.
    Workers of lower indices take GPUs first, roles left out take none. Raises nothing: errors are in `problems`."""
    notes, problems = list(config.notes), list[str]()
    model = _model(config, problems)
    config, selection = _with_defaults(config, machine, model), Selection(roles, index, node)
    placed, unplaced = place_workers(config, machine, selection, env)
    workers = tuple(replace(worker, memory=_memory(worker, model, machine, env)) for worker in placed)
    frontends = frontend_slots(config, selection)
    problems += unplaced
    problems += checks.problems(config, machine, workers, frontends, model, env)
    unknown = "" if problems else _unknown(config, model, workers)
    notes += _notes(config, machine, model, workers, whole=roles is None and index is None)
    if frontends and config.frontend and machine.own_network and is_loopback(config.frontend.host):
        notes.append(_UNREACHED.format(config.frontend.host))
    explained = tuple(explain(config, model)) if model is not None else ()
    return Plan(config, machine, workers, frontends, tuple(problems), unknown, tuple(notes), explained)


def worker_memory(config: Config, slot: Slot) -> Memory | None:
    """Return the planned memory of a worker that already has its slot; None if sizes are unknown."""
    machine = Machine.detect({})  # a slot has NVML's GPU numbers, and CUDA_VISIBLE_DEVICES would hide some
    worker = PlannedWorker(slot, worker_config(config, slot), len(slot.gpus))
    return _memory(worker, _model(config, []), machine, os.environ)


def _with_defaults(config: Config, machine: Machine, model: ModelFacts | None) -> Config:
    """Add pdserve's defaults for this machine. The file's arguments win."""
    decode = config.decode and _limit_chunks(_eager_on_cpu(_scale_memory(config.decode), machine), model)
    prefill = config.prefill and _eager_on_cpu(_scale_memory(config.prefill), machine)
    return replace(config, decode=decode, prefill=prefill)


def _scale_memory(worker: W) -> W:
    if worker.share == 1:
        return worker
    memory = round(GPU_UTILIZATION * worker.share, 3)
    return _with_argument(worker, "gpu-memory-utilization", memory, "pdserve (share of a GPU)")


def _eager_on_cpu(worker: W, machine: Machine) -> W:
    """Run CPU engines eagerly, because compiling takes minutes at each start."""
    if worker.engine == "sim" or gpus_needed(worker, machine):
        return worker
    return _with_argument(worker, "enforce-eager", True, "pdserve (no GPU)")


def _limit_chunks(decode: DecodeConfig, model: ModelFacts | None) -> DecodeConfig:
    """Limit the chunks of prompts in decode workers: each chunk delays the running sequences by a step. A model that
    takes images keeps vLLM's default, because vLLM may need a whole image in a step."""
    args = decode.engine_args
    if not decode.remote_prefill or args.get("enable-chunked-prefill") is False:
        return decode
    if decode.engine == "vllm" and (model is None or model.multimodal or model.odd_layers):
        return decode
    asked = args.get("max-model-len")
    longest = asked if isinstance(asked, int) else model.max_len if model else None
    tokens = min(DECODE_CHUNK, longest or DECODE_CHUNK)
    return _with_argument(decode, "long-prefill-token-threshold", tokens, "pdserve (short gaps)")


def _with_argument(worker: W, name: str, value: object, origin: str) -> W:
    if name in worker.engine_args:
        return worker
    return replace(
        worker,
        engine_args={**worker.engine_args, name: value},
        origins={**worker.origins, name: origin},
    )


def _model(config: Config, problems: list[str]) -> ModelFacts | None:
    """Return the model's sizes; None if they cannot be read. A hub id without files here is no problem."""
    worker = config.decode or config.prefill
    revision = str(worker.engine_args.get("revision", "main")) if worker else "main"
    folder = find_folder(config.model, revision)
    if folder is None:
        if config.model.startswith("/"):
            problems.append(f"{config.path}: model folder {config.model} {_missing(Path(config.model))}")
        return None
    try:
        return read_model(folder)
    except ConfigError as error:
        problems += error.problems
        return None


def _missing(folder: Path) -> str:
    for parent in reversed(folder.parents):
        if os.path.isdir(parent) and not os.access(parent, os.X_OK, effective_ids=True):
            return (
                f"is not readable: this user may not enter {parent} (systemd's ProtectHome? docs/hosts.md)."
            )
    return "not found: create it or correct model."


def _unknown(config: Config, model: ModelFacts | None, workers: Sequence[PlannedWorker]) -> str:
    if all(worker.memory is not None or worker.config.engine == "sim" for worker in workers):
        return ""
    if model is None:
        return (
            f"{config.model} is not in the Hugging Face cache, so the size of its weights and KV is unknown: "
            "download it (hf download), or give a folder with its config.json."
        )
    if names := sorted({name for worker in workers for name in _uncounted(worker, model)}):
        return f"Weights and KV capacity are not estimated with {', '.join(names)}."
    if model.odd_layers:
        return f"Weights and KV capacity are not estimated for a model with layers of {', '.join(model.odd_layers)}."
    return (
        f"{model.folder} has neither the weights nor their index, so that their size is unknown: download the index "
        "(hf download MODEL --include '*.json'), or the model."
    )


def _notes(
    config: Config,
    machine: Machine,
    model: ModelFacts | None,
    workers: Sequence[PlannedWorker],
    whole: bool,
) -> Iterator[str]:
    if model is None and not config.model.startswith("/"):
        yield f"{config.model} is not in the Hugging Face cache: vLLM will download it."
    version = installed_vllm().version
    if version and version != VLLM_VERSION and any(worker.config.engine == "vllm" for worker in workers):
        yield f"vLLM {version} is installed, but pdserve uses vLLM's internals and needs {VLLM_VERSION}."
    if model is not None and machine.half_is_slow and any(_half_on_cpu(worker, model) for worker in workers):
        yield (
            "bfloat16 and float16 are slow on this CPU, which has no AVX-512. With dtype: float32 (in Common, and in "
            "common-configs), prompts of the demo model take a third of the time, but KV takes twice the memory."
        )
    if any(draft_model(worker.config.engine_args) for worker in workers):
        yield "Speculative decoding is tested with n-gram and a draft model on CPUs, not with EAGLE, MTP or GPUs."
    if whole and config.spans_hosts:
        yield f"Workers of this graph span hosts (nnodes): {start_commands(config)}"
    used = {index for worker in workers for index in worker.slot.gpus}
    idle = [str(gpu.index) for gpu in machine.gpus if gpu.index not in used]
    if whole and idle and any(worker.config.engine == "vllm" for worker in workers):
        gpus = f"GPU {idle[0]} is" if len(idle) == 1 else f"GPUs {', '.join(idle)} are"
        yield f"{gpus} idle: to use more, raise ServiceArgs.workers or tensor-parallel-size."


def _half_on_cpu(worker: PlannedWorker, model: ModelFacts) -> bool:
    dtype = model.resolve_dtype(worker.config.engine_args.get("dtype", "auto"))
    return worker.config.engine == "vllm" and not worker.gpus and dtype in ("bfloat16", "float16")


def _memory(
    worker: PlannedWorker, model: ModelFacts | None, machine: Machine, env: Mapping[str, str]
) -> Memory | None:
    if model is None or not model.stored or model.odd_layers or worker.config.engine == "sim":
        return None
    if any(_uncounted(worker, model)):
        return None
    args = worker.config.engine_args
    return size(
        model, args, smallest_gpu(worker, machine), cpu_kv=None if worker.gpus else cpu_kv_bytes(args, env)
    )


def _uncounted(worker: PlannedWorker, model: ModelFacts) -> Iterator[str]:
    """Yield the worker's arguments whose memory is not estimated. The argument `quantization` is estimated if the
    weights are stored quantized, because it then changes nothing."""
    if draft_model(worker.config.engine_args):
        yield "a draft model"
    for name in UNCOUNTED:
        if worker.config.engine_args.get(name) and not (name == "quantization" and model.quantized):
            yield name
