"""Renders a plan as tables for a terminal, or as a dictionary for `--json`."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.config.engine_args.arguments import KV_ROLES
from pdserve.contract.records import Role
from pdserve.observe.tables import table
from pdserve.plan.machine import GIB, in_gib
from pdserve.plan.memory import Memory
from pdserve.plan.plan import Plan
from pdserve.plan.slots import PlannedWorker, disk_folder
from pdserve.util.net import strip_passwords

_SECRET = {"hf-token"}
_TITLE = {"title_justify": "left", "title_style": "bold"}


def render(plan: Plan, *, explain: bool = False) -> RenderableType:
    """Render for rich's `Console.print`; needs 80 columns. `explain`: add how a model of this kind is served."""
    problems = [Text(f"problem: {problem}\n", style="red") for problem in plan.problems]
    parts: list[RenderableType] = [*problems, _heading(plan), _processes(plan)]
    if any(worker.memory for worker in plan.workers):
        parts.append(_memory(plan))
    parts.append(_arguments(plan))
    parts += [Text(f"model: {sentence}") for sentence in plan.explained if explain]
    parts += _sentences(plan)
    return Group(*parts)


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return plain data. Sizes are in bytes; those in `memory` are of one rank."""
    config = plan.config
    return {
        "file": str(config.path),
        "model": config.model,
        "served_model_name": config.served_model_name,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "unknown": plan.unknown or None,
        "slo": dataclasses.asdict(config.slo) if config.slo else None,
        "notes": list(plan.notes),
        "explained": list(plan.explained),
        "url": _url(plan),
        "nats": config.nats and strip_passwords(config.nats),
        "etcd": config.etcd and strip_passwords(config.etcd),
        "state_dir": str(config.state_dir),
        "from_environment": list(config.from_environment),
        "machine": dataclasses.asdict(plan.machine),
        "frontends": [slot.name for slot in plan.frontends],
        "workers": [_worker_as_dict(worker, plan) for worker in plan.workers],
    }


def _worker_as_dict(worker: PlannedWorker, plan: Plan) -> dict[str, Any]:
    slot, memory = worker.slot, worker.memory
    return {
        "name": slot.name,
        "engine": worker.config.engine,
        "node": slot.node,
        "gpus_needed": worker.gpus,
        "gpus": list(slot.gpus),
        "kv_port": slot.kv_port,
        "stream_port": slot.stream_port,
        "pages_port": slot.pages_port,
        "env": dict(slot.env),
        "arguments": {
            name: {"value": value, "from": origin} for name, value, origin in _origins(worker, plan)
        },
        "kv_offload": worker.config.kv_offload,
        "kv_offload_disk": worker.config.kv_offload_disk,
        "memory": memory and {**dataclasses.asdict(memory), **_derived(memory)},
    }


def _derived(memory: Memory) -> dict[str, Any]:
    known = memory.kv_space is not None
    return {
        "fixed": memory.fixed,
        "kv_blocks": memory.blocks if known else None,
        "kv_tokens": memory.tokens if known else None,
        "max_concurrency": round(memory.max_concurrency, 2) if known else None,
    }


def _heading(plan: Plan) -> Text:
    config, machine = plan.config, plan.machine
    nats, etcd = (strip_passwords(each or "") or "started by serve" for each in (config.nats, config.etcd))
    gpus = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory / GIB:.1f} GiB)" for gpu in machine.gpus)
    imagined = " (what if)" if machine.imagined else ""
    lines = [
        f"{config.served_model_name}  {config.model}",
        f"at       {_url(plan) or 'no frontend here'}",
        f"machine  {machine.cores} cores, {machine.memory / GIB:.0f} GiB of RAM",
        f"GPUs     {gpus or 'none'}{imagined}",
        f"servers  NATS {nats}, etcd {etcd}",
    ]
    fixed = {"streams": config.stream_port, "pages": config.pages_port}
    if ports := [f"{name} from {first}" for name, first in fixed.items() if first]:
        lines.append(f"ports    {', '.join(ports)}")
    if config.from_environment:
        lines.append(f"set by   {', '.join(config.from_environment)}")
    if config.slo:
        lines.append(f"promise  {config.slo}")
    text = Text("\n".join(lines) + "\n")
    text.stylize("bold", 0, len(config.served_model_name))
    return text


def _url(plan: Plan) -> str | None:
    return f"{plan.config.url}/v1" if plan.frontends else None


def _processes(plan: Plan) -> Table:
    rows = table("process", "engine", "runs on", "port", "what it does", title="Processes", **_TITLE)
    for worker in plan.workers:
        slot, config = worker.slot, worker.config
        rows.add_row(slot.name, config.engine, _hardware(worker), str(slot.kv_port), _does(worker, plan))
    for slot in plan.frontends:
        frontend = plan.config.frontend
        assert frontend is not None
        does = (
            f"HTTP, {frontend.router} over decode workers; up to {frontend.max_waiting:,} requests wait, for up to "
            f"{frontend.max_wait:g} s"
        )
        rows.add_row(slot.name, "", "CPU", str(frontend.port), does)
    return rows


def _hardware(worker: PlannedWorker) -> str:
    host = f"host {worker.slot.node + 1}: " if worker.config.nodes > 1 else ""
    if worker.slot.gpus:
        return f"{host}GPU {','.join(map(str, worker.slot.gpus))}"
    if worker.gpus:
        return f"{host}{worker.gpus} GPU{'s' * (worker.gpus > 1)}, not found"
    threads = worker.slot.env.get("OMP_NUM_THREADS")
    if not threads:
        return f"{host}CPU"
    ranks = f"{worker.config.ranks_per_node} x " if worker.config.ranks_per_node > 1 else ""
    return f"{host}CPU, {ranks}{threads} thread{'s' * (threads != '1')}"


def _does(worker: PlannedWorker, plan: Plan) -> str:
    decode = plan.config.decode
    if worker.slot.role is Role.PREFILL:
        stands_in = plan.config.prefill is not None and plan.config.prefill.stand_in
        return "prefill; decode while no decode worker is available" if stands_in else "prefill"
    if worker.slot.role is Role.BOTH:
        return "decode; prefill for itself and others while it has capacity"
    if decode is None or not decode.remote_prefill:
        return "prefill and decode"
    if not decode.conditional_disagg:
        return "decode; all prefill remote"
    if decode.policy == "adaptive":
        return "decode; prefill local or remote, whichever is faster"
    return (
        f"decode; prefill remote above {decode.max_local_prefill_length} new tokens "
        f"while fewer than {decode.max_prefill_queue_size} wait"
    )


def _memory(plan: Plan) -> Table:
    planned = [(worker.slot.name, worker.memory) for worker in plan.workers if worker.memory]
    numbers = ("weights", "activations", "fixed", "KV space", "KV/token", "KV tokens", "blocks", "requests")
    title = "Memory of each rank in GiB, and the KV cache of each worker"
    rows = table("worker", *numbers, numbers=numbers, title=title, caption_justify="left", **_TITLE)
    for name, memory in planned:
        rows.add_row(name, *_memory_cells(memory))
    longest = ", ".join(sorted({f"{memory.max_model_len:,}" for _, memory in planned}))
    rows.caption = (
        "activations: peak of a step; fixed: CUDA, NCCL, CUDA graphs; requests: how many of max-model-len "
        f"({longest}) fit at once"
    )
    return rows


def _memory_cells(memory: Memory) -> Iterator[str]:
    per_token = f"{memory.kv_per_token / 1024:,.4g} KiB"
    yield f"{memory.weights / GIB:.2f}"
    yield f"{memory.activations / GIB:.2f}" if memory.activations else "-"
    yield f"{memory.fixed / GIB:.2f}" if memory.fixed else "-"
    if memory.kv_space is None:
        yield from ("?", per_token, "?", "?", "?")
        return
    yield from (f"{max(0, memory.kv_space) / GIB:.2f}", per_token, f"{memory.tokens:,}")
    yield from (f"{memory.blocks:,} x {memory.block_size}", f"{memory.max_concurrency:.1f}")


def _arguments(plan: Plan) -> Table:
    """Return a table of arguments and environment variables: those of the first worker of each role. Other workers of
    the role have the same arguments."""
    rows = table("role", "argument", "value", "from", title="vLLM arguments", **_TITLE)
    first: dict[Role, PlannedWorker] = {}
    for worker in plan.workers:
        first.setdefault(worker.slot.role, worker)
    for role, worker in first.items():
        for name, value, origin in _origins(worker, plan):
            rows.add_row(role.value, name, str(value), origin)
        rows.add_section()
    return rows


def _origins(worker: PlannedWorker, plan: Plan) -> Iterator[tuple[str, object, str]]:
    """Yield name, value and origin of each argument and environment variable of a worker."""
    config, role = worker.config, worker.slot.role
    for name, value in sorted(config.engine_args.items()):
        shown = "…" if name in _SECRET else value
        shown = json.dumps(shown) if isinstance(shown, dict | list | bool) else shown
        yield name, shown, config.origins.get(name, "pdserve")
    if config.engine == "vllm" and role.includes(Role.DECODE):
        yield "kv-events-config", "own socket, for prefix hits", "pdserve (graph)"
    decode = plan.config.decode
    if config.engine == "vllm" and (decode is None or decode.remote_prefill):  # KV moves between workers
        yield "kv-transfer-config", f"NIXL, {KV_ROLES[role]}, recompute", "pdserve (graph)"
    if config.kv_offload:
        yield "kv-offload", _offload(worker, config.kv_offload), "pdserve (host memory)"
    if config.kv_offload_disk:
        where = disk_folder(plan.config, config)
        yield "kv-offload-disk", f"{_offload(worker, config.kv_offload_disk)}, in {where}", "pdserve (disk)"
    for name, text in worker.slot.env.items():
        yield name, text, "pdserve (environment)"


def _offload(worker: PlannedWorker, size: int) -> str:
    """Format a size of host memory or disk, and the tokens whose KV it holds."""
    memory = worker.memory
    if memory is None:
        return in_gib(size)
    return f"{in_gib(size)}, {size // (worker.config.ranks * memory.kv_per_token):,} tokens"


def _sentences(plan: Plan) -> Iterator[Text]:
    for note in plan.notes:
        yield Text(f"note: {note}", style="dim")
    if plan.fits is None:
        yield Text(f"Unknown whether it fits: {plan.unknown}", style="yellow")
    elif plan.fits:
        yield Text("It fits.", style="green")
