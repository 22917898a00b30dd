"""Samples of a running graph: its prefill queue, and the KV use of each role."""

import asyncio
import statistics
import time
from dataclasses import dataclass

from pdserve.cli.find import GraphView
from pdserve.contract.records import Role
from pdserve_bench.graphs.watch import read_loads

_INTERVAL = 0.5
"""Seconds between two samples."""


@dataclass(frozen=True)
class Sample:
    at: float
    """Monotonic seconds."""
    queued: int
    """Prefill requests that no worker has pulled."""
    decode_kv: float
    """Mean share of the decode workers' KV blocks in use, 0 to 1."""
    prefill_kv: float
    """Mean share of the prefill workers' KV blocks in use, 0 to 1."""


async def sample(view: GraphView, found: list[Sample]) -> None:
    """Append samples until cancelled. Workers that do not reply are left out."""
    while True:
        began = time.monotonic()
        workers = {role: view.instances(role) for role in (Role.DECODE, Role.PREFILL)}
        every = {worker.id: worker for of_role in workers.values() for worker in of_role}
        loads = await read_loads(every.values())
        usage = {
            role: [loads[worker.id].kv_usage for worker in of_role if worker.id in loads]
            for role, of_role in workers.items()
        }
        if loads:
            found.append(
                Sample(
                    began,
                    max(load.queue_depth for load in loads.values()),
                    *(statistics.fmean(shares) if shares else 0.0 for shares in usage.values()),
                )
            )
        await asyncio.sleep(max(0.0, began + _INTERVAL - time.monotonic()))
