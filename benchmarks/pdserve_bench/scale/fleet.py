"""Many workers on simulated engines in one process.

    python -m pdserve_bench.scale.fleet FILE DECODE PREFILL OF_DECODE OF_PREFILL WARM_UPS

On stdout: `ready` when all workers are registered, and each knows all of the other role: those that started first get
an event for each that comes later, which takes a process of hundreds of them a while. `OF_`: the graph's in all."""

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from pdserve.cli.find import find_place
from pdserve.decode.warm_up import WarmUp
from pdserve.decode.worker import DecodeWorker
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.presence import Presence
from pdserve.records import Role

AT_ONCE = 16
LOOK = 0.2


async def main(file: Path, decode: int, prefill: int, of_decode: int, of_prefill: int, warm_ups: int) -> None:
    if not warm_ups:
        Presence.warm_up = _nothing  # type: ignore[assignment,method-assign]
        WarmUp.run = _never  # type: ignore[assignment,method-assign]
    starting = asyncio.Semaphore(AT_ONCE)
    decoders = _workers(DecodeWorker, Role.DECODE, file, decode)
    prefillers = _workers(PrefillWorker, Role.PREFILL, file, prefill)
    known = {**dict.fromkeys(decoders, of_prefill), **dict.fromkeys(prefillers, of_decode)}
    async with asyncio.TaskGroup() as group:

        async def start(worker: Any) -> None:
            async with starting:
                group.create_task(worker.run())
                await worker.ready.wait()
                await worker._presence.announced.wait()

        await asyncio.gather(*map(start, known))
        while any(len(worker.view._instances) < count for worker, count in known.items()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
        print("ready", flush=True)


def _workers(kind: Any, role: Role, file: Path, count: int) -> list[Any]:
    config, slot = find_place(role, file, 0)
    return [kind.connect(config, replace(slot, index=index, kv_port=0), "") for index in range(count)]


async def _nothing(*_: object) -> None:
    return


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
