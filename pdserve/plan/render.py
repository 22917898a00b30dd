"""The plan as text for a terminal, and as a dictionary for `--json`."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.messages import Role
from pdserve.plan.machine import GIB
from pdserve.plan.memory import Memory
from pdserve.plan.plan import Plan
from pdserve.plan.slots import PlannedWorker

_SECRET = {"hf-token"}


def render(plan: Plan) -> RenderableType:
    """For rich's `Console.print`; reads well from 80 columns."""
    parts: list[RenderableType] = [_heading(plan), _processes(plan)]
    if any(worker.memory for worker in plan.workers):
        parts.append(_memory(plan))
    parts += [_arguments(plan), *_sentences(plan)]
    return Group(*parts)


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Plain data; sizes in bytes and for one rank."""
    config = plan.config
    return {
        "file": str(config.path),
        "model": config.model,
        "served_model_name": config.served_model_name,
        "fits": not plan.problems,
        "problems": list(plan.problems),
        "notes": list(plan.notes),
        "url": _url(plan),
        "nats": config.nats,
        "etcd": config.etcd,
        "state_dir": str(config.state_dir),
        "machine": dataclasses.asdict(plan.machine),
        "frontends": [slot.name for slot in plan.frontends],
        "workers": [_worker_as_dict(worker, plan) for worker in plan.workers],
    }


def _worker_as_dict(worker: PlannedWorker, plan: Plan) -> dict[str, Any]:
    slot, memory = worker.slot, worker.memory
    return {
        "name": slot.name,
        "engine": worker.config.engine,
        "gpus_needed": worker.gpus,
        "gpus": list(slot.gpus),
        "kv_port": slot.kv_port,
        "env": dict(slot.env),
        "arguments": {
            name: {"value": value, "from": origin} for name, value, origin in _rows(worker, _split(plan))
        },
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
    cards = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory / GIB:.1f} GiB)" for gpu in machine.gpus)
    imagined = " (what if)" if machine.imagined else ""
    lines = [
        f"{config.served_model_name}  {config.model}",
        f"at       {_url(plan) or 'no frontend here'}",
        f"machine  {machine.cores} cores, {machine.memory / GIB:.0f} GiB of RAM",
        f"GPUs     {cards or 'none'}{imagined}",
        f"servers  NATS {config.nats or 'started by serve'}, etcd {config.etcd or 'started by serve'}",
    ]
    text = Text("\n".join(lines) + "\n")
    text.stylize("bold", 0, len(config.served_model_name))
    return text


def _url(plan: Plan) -> str | None:
    frontend = plan.config.frontend
    return f"http://{frontend.host}:{frontend.port}/v1" if frontend and plan.frontends else None


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _processes(plan: Plan) -> Table:
    table = _table("Processes", "process", "engine", "runs on", "port", "what it does")
    for worker in plan.workers:
        slot = worker.slot
        table.add_row(
            slot.name, worker.config.engine, _runs_on(worker), str(slot.kv_port), _does(worker, plan)
        )
    for slot in plan.frontends:
        frontend = plan.config.frontend
        assert frontend is not None
        does = (
            f"HTTP, {frontend.router} over decode workers; up to {frontend.max_waiting:,} requests wait, for up to "
            f"{frontend.max_wait:g} s"
        )
        table.add_row(slot.name, "", "CPU", str(frontend.port), does)
    return table


def _runs_on(worker: PlannedWorker) -> str:
    if worker.slot.gpus:
        return f"GPU {','.join(map(str, worker.slot.gpus))}"
    if worker.gpus:
        return f"{worker.gpus} GPU{'s' * (worker.gpus > 1)}, not found"
    threads = worker.slot.env.get("OMP_NUM_THREADS")
    if not threads:
        return "CPU"
    ranks = f"{worker.config.ranks} x " if worker.config.ranks > 1 else ""
    return f"CPU, {ranks}{threads} thread{'s' * (threads != '1')}"


def _does(worker: PlannedWorker, plan: Plan) -> str:
    decode = plan.config.decode
    if worker.slot.role is Role.PREFILL:
        return "prefill"
    if decode is None or not decode.remote_prefill:
        return "prefill and decode"
    if not decode.conditional_disagg:
        return "decode; all prefill remote"
    return (
        f"decode; prefill remote above {decode.max_local_prefill_length} new tokens "
        f"while fewer than {decode.max_prefill_queue_size} wait"
    )


def _memory(plan: Plan) -> Table:
    numbers = ("weights", "activations", "fixed", "KV space", "KV/token", "KV tokens", "blocks", "requests")
    table = _table(
        "Memory of each rank in GiB, and the KV cache of each worker", "worker", *numbers, numbers=numbers
    )
    for worker in plan.workers:
        if worker.memory is not None:
            table.add_row(worker.slot.name, *_memory_cells(worker.memory))
    longest = ", ".join(sorted({f"{each.memory.max_model_len:,}" for each in plan.workers if each.memory}))
    table.caption = (
        "activations: the peak of a step; fixed: CUDA, NCCL, CUDA graphs; requests: how many of "
        f"max-model-len ({longest}) fit at once"
    )
    table.caption_justify = "left"
    return table


def _memory_cells(memory: Memory) -> Iterator[str]:
    yield f"{memory.weights / GIB:.2f}"
    yield f"{memory.activations / GIB:.2f}" if memory.activations else "-"
    yield f"{memory.fixed / GIB:.2f}" if memory.fixed else "-"
    if memory.kv_space is None:
        yield from ("?", _per_token(memory), "?", "?", "?")
        return
    yield f"{max(0, memory.kv_space) / GIB:.2f}"
    yield _per_token(memory)
    yield f"{memory.tokens:,}"
    yield f"{memory.blocks:,} x {memory.block_size}"
    yield f"{memory.max_concurrency:.1f}"


def _per_token(memory: Memory) -> str:
    return f"{memory.kv_per_token / 1024:,.4g} KiB"


def _arguments(plan: Plan) -> Table:
    """A row for each argument of a role; workers of one role have the same."""
    table = _table("vLLM arguments", "role", "argument", "value", "from")
    for worker in plan.workers:
        if worker.slot.index != min(each.slot.index for each in plan.workers if _same_role(each, worker)):
            continue
        for name, value, origin in _rows(worker, _split(plan)):
            table.add_row(worker.slot.role.value, name, str(value), origin)
        table.add_section()
    return table


def _split(plan: Plan) -> bool:
    """Whether KV moves between workers."""
    return plan.config.prefill is not None


def _same_role(one: PlannedWorker, other: PlannedWorker) -> bool:
    return one.slot.role is other.slot.role


def _rows(worker: PlannedWorker, split: bool) -> Iterator[tuple[str, object, str]]:
    for name, value in sorted(worker.config.engine_args.items()):
        shown = "…" if name in _SECRET else value
        shown = json.dumps(shown) if isinstance(shown, dict | list | bool) else shown
        yield name, shown, worker.config.origins.get(name, "pdserve")
    if worker.config.engine == "vllm":
        for name, text in _set_by_graph(worker.slot.role, split).items():
            yield name, text, "pdserve (graph)"
    for name, text in worker.slot.env.items():
        yield name, text, "pdserve (environment)"


def _set_by_graph(role: Role, split: bool) -> dict[str, str]:
    """The arguments that pdserve itself gives a vLLM engine beside the model and its name, in words. `split`: KV moves
    between workers."""
    found = {"kv-events-config": "own socket, for prefix hits"} if role is Role.DECODE else {}
    if split:
        kv_role = "kv_producer" if role is Role.PREFILL else "kv_consumer"
        found["kv-transfer-config"] = f"NIXL, {kv_role}, recompute"
    return found


def _sentences(plan: Plan) -> Iterator[Text]:
    for note in plan.notes:
        yield Text(f"note: {note}", style="dim")
    if not plan.problems:
        yield Text("It fits.", style="green")
    for problem in plan.problems:
        yield Text(f"problem: {problem}", style="red")
