"""The plan: what would run where, and whether it fits. Loads no weights, starts nothing."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pdserve.config.host import find_folder
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.messages import Role
from pdserve.plan import checks
from pdserve.plan.defaults import cpu_kv_bytes, with_machine_defaults
from pdserve.plan.machine import Machine
from pdserve.plan.memory import Memory, size
from pdserve.plan.model_folder import ModelFacts, read_model
from pdserve.plan.slots import Part, Seat, Slot, frontend_slots, seat_workers


@dataclass(frozen=True)
class PlannedWorker(Seat):
    memory: Memory | None = None
    """None where sizes are unknown, see the plan's notes; a simulated engine has none"""


@dataclass(frozen=True)
class Plan:
    config: Config
    """with what this machine adds (`defaults.py`): start roles with this one, not with the loaded one"""
    machine: Machine
    workers: tuple[PlannedWorker, ...]
    """decode first"""
    frontends: tuple[Slot, ...]
    model: ModelFacts | None
    problems: tuple[str, ...] = ()
    """why it cannot run, one sentence each with what to do; empty: it can"""
    notes: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All processes: decode workers, prefill workers, frontends."""
        return (*(worker.slot for worker in self.workers), *self.frontends)


def make_plan(
    config: Config,
    machine: Machine,
    roles: Collection[Role] | None = None,
    index: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Plan:
    """Never fails: what is wrong is in `problems`. `roles` and `index` plan a part of the graph, as for one
    role on another host: its ports are those it has in the whole graph, its GPUs the first of this
    machine."""
    config, part = with_machine_defaults(config, machine), Part(roles, index)
    notes, problems = list(config.notes), list[str]()
    model = _model(config, problems, notes)
    seats, unplaced = seat_workers(config, machine, part, env)
    workers = tuple(_planned(seat, model, machine, env) for seat in seats)
    frontends = frontend_slots(config, part)
    problems += unplaced
    problems += checks.all_problems(config, machine, workers, model, len(frontends), env)
    return Plan(config, machine, workers, frontends, model, tuple(problems), tuple(notes))


def worker_memory(config: Config, slot: Slot, env: Mapping[str, str] = os.environ) -> Memory | None:
    """What the plan says of a worker of this machine that has its slot already; None where sizes are unknown."""
    section = config.decode if slot.role is Role.DECODE else config.prefill
    assert section is not None, f"{config.path} has no section for a {slot.role.value} worker"
    machine = Machine.detect({})  # a slot counts the cards as NVML does, whatever CUDA shows of them
    seat = Seat(slot, section, len(slot.gpus))
    return _planned(seat, _model(config, [], []), machine, env).memory


def _model(config: Config, problems: list[str], notes: list[str]) -> ModelFacts | None:
    """None where its sizes cannot be known."""
    worker = config.decode or config.prefill
    revision = str(worker.engine_args.get("revision", "main")) if worker else "main"
    folder = find_folder(config.model, revision)
    if folder is None:
        if config.model.startswith("/"):
            problems.append(
                f"{config.path}: model folder {config.model} not found: put it there or correct model."
            )
        else:
            notes.append(f"{config.model} is not in the Hugging Face cache: vLLM will download it.")
        notes.append("Weights and KV capacity are unknown without the model's files.")
        return None
    try:
        model = read_model(folder)
    except ConfigError as error:
        problems += error.problems
        return None
    if model.odd_layers:
        odd = ", ".join(model.odd_layers)
        notes.append(f"Weights and KV capacity are not estimated for a model with layers of {odd}.")
        return None
    return model


def _planned(seat: Seat, model: ModelFacts | None, machine: Machine, env: Mapping[str, str]) -> PlannedWorker:
    if model is None or seat.config.engine == "sim":
        return PlannedWorker(seat.slot, seat.config, seat.gpus)
    cards = [gpu for gpu in machine.gpus if gpu.index in seat.slot.gpus]
    smallest = min(cards, key=lambda gpu: gpu.memory, default=None)
    cpu_kv = None if seat.gpus else cpu_kv_bytes(seat.config, env)
    memory = size(model, seat.config.engine_args, smallest, cpu_kv=cpu_kv)
    return PlannedWorker(seat.slot, seat.config, seat.gpus, memory)
