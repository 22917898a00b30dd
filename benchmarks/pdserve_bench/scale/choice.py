"""How long a frontend takes to choose a decode worker among many."""

import time
from types import SimpleNamespace
from typing import Any

from pdserve.frontend.model.link import Link
from pdserve.frontend.model.workers import WorkerPool
from pdserve.records import Instance, Role
from pdserve_bench.samples import percentile

REQUESTS = 2000
IN_FLIGHT = 3


def choice_seconds(workers: int) -> list[float]:
    """p50 and p99 for a request: its admission asks for the capacity, it is placed, and an earlier one ends."""
    nothing: Any = None
    pool = WorkerPool("least-loaded", "0", nothing, nothing)
    for number in range(workers):
        name = f"decode-{number}-{number:08x}"
        pool._instances[name] = Instance(
            name, Role.DECODE, vllm_version="0", max_num_seqs=64, kv_tokens=100_000, max_concurrency=12.0
        )
        pool._links[name] = Link(name, pool._touch)
        pool._touch(pool._links[name])
    asked: Any = SimpleNamespace(
        prompt=list(range(100)),
        tokens=[1],
        request=SimpleNamespace(cache_salt=None),
        lost_by=set(),
        trace=SimpleNamespace(promised=None),
    )
    placed: list[tuple[Link, str]] = []
    times = []
    for number in range(REQUESTS):
        began = time.perf_counter()
        for _ in range(3):  # `enter` asks twice, `advance` once
            assert pool.capacity.free_requests
        link = pool.pick(asked, only_others=False)
        assert link is not None
        link.generations[str(number)] = asked
        link.tokens += 500
        link.touch()
        placed.append((link, str(number)))
        if len(placed) > IN_FLIGHT * workers:
            earlier, key = placed.pop(0)
            del earlier.generations[key]
            earlier.tokens -= 500
            earlier.touch()
        times.append(time.perf_counter() - began)
    return [percentile(times, share) for share in (0.5, 0.99)]
