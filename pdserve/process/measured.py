"""Planned against measured: what the plan says of a worker's memory, and what its engine found when it started."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.config.schema import Config
from pdserve.engine.base import EngineFacts
from pdserve.plan.machine import GIB
from pdserve.plan.memory import Memory
from pdserve.plan.plan import worker_memory
from pdserve.plan.slots import Slot

log = logging.getLogger(__name__)

TOLERANCE = 0.2
"""of the plan; what is further off is worth a look"""


@dataclass(frozen=True)
class Comparison:
    what: str
    planned: int
    measured: int
    matters: bool = True
    """false: small parts of the whole, whose error alone costs little"""

    @property
    def factor(self) -> float:
        return self.measured / self.planned if self.planned else float("inf")

    @property
    def off(self) -> bool:
        return self.matters and abs(self.factor - 1) > TOLERANCE

    def __str__(self) -> str:
        if self.what == "KV blocks":
            return f"{self.what} {self.measured:,} / {self.planned:,} (x {self.factor:.2f})"
        return f"{self.what} {self.measured / GIB:.2f} / {self.planned / GIB:.2f} GiB (x {self.factor:.2f})"


def compare(planned: Memory, facts: EngineFacts) -> Iterator[Comparison]:
    """What the engine does not tell is left out."""
    yield Comparison("KV blocks", planned.blocks, facts.kv_blocks)
    if facts.weight_bytes:
        yield Comparison("weights", planned.weights, facts.weight_bytes)
    if facts.consumed_bytes:
        consumed = planned.weights + planned.runtime
        yield Comparison("weights and runtime", consumed, facts.consumed_bytes)
    if facts.peak_bytes:
        peak = planned.activations + planned.graphs
        yield Comparison("activations and CUDA graphs", peak, facts.peak_bytes, matters=False)


def log_memory(config: Config, slot: Slot, facts: EngineFacts) -> None:
    """Say nothing where there was no plan: a simulated engine, or a model whose sizes are not known."""
    planned = worker_memory(config, slot)
    if planned is None or planned.kv_space is None:
        return
    found = list(compare(planned, facts))
    text = ", ".join(map(str, found))
    if any(each.off for each in found):
        log.warning("memory is not as planned, measured / planned: %s; docs/memory.md has the terms", text)
    else:
        log.info("memory, measured / planned: %s", text)
