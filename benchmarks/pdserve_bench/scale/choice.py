"""How long a frontend takes to choose a worker among so many: a program of its own, run on the sources that PYTHONPATH
names, which may be an older pdserve's.

    python choice.py WORKERS POLICY

On stdout: `p50 p99`, microseconds for a request: its admission asks for the capacity, it is placed, another ends."""

import inspect
import sys
import time
from types import SimpleNamespace
from typing import Any

from pdserve.frontend.model.workers import Link, WorkerPool
from pdserve.records import Instance, Role

REQUESTS = 2000
IN_FLIGHT = 3
"""requests at each worker, about"""


def main(workers: int, policy: str) -> None:
    pool: Any = WorkerPool(policy, "0", None, None)  # type: ignore[arg-type]
    touch = getattr(pool, "_touch", None)
    for number in range(workers):
        name = f"decode-{number}-{number:08x}"
        pool._instances[name] = Instance(
            name, Role.DECODE, vllm_version="0", max_num_seqs=64, kv_tokens=100_000, max_concurrency=12.0
        )
        made: Any = Link
        pool._links[name] = (
            made(name, touch) if "changed" in inspect.signature(Link).parameters else made(name, "0")
        )
        if touch is not None:
            touch(pool._links[name])
    takes_generation = "generation" in inspect.signature(pool.pick).parameters
    asked: Any = SimpleNamespace(
        prompt=list(range(100)), request=SimpleNamespace(cache_salt=None), lost_by=set()
    )
    placed: list[Any] = []
    times = []
    for number in range(REQUESTS):
        began = time.perf_counter()
        for _ in range(3):  # `enter` asks twice, `advance` once
            assert pool.capacity.free_requests
        link = pool.pick(asked if takes_generation else (), only_others=False)
        link.generations[str(number)] = SimpleNamespace(tokens=[1], prompt=asked.prompt)
        link.tokens += 500
        placed.append((link, str(number)))
        ended = [placed.pop(0)] if len(placed) > IN_FLIGHT * workers else []
        for each, key in ended:
            del each.generations[key]
            each.tokens -= 500
        if touch is not None:
            for each in (link, *(each for each, _ in ended)):
                touch(each)
        times.append(time.perf_counter() - began)
    times.sort()
    print(1e6 * times[len(times) // 2], 1e6 * times[int(0.99 * len(times))])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
