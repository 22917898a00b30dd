"""Start the engines on a GPU one after the other, because vLLM measures the memory that the whole card has lost, and
would count another engine's weights as its own (`gpu_worker.determine_available_memory`)."""

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

RETRY_INTERVAL = 0.1
"""Seconds between two tries to lock a GPU."""


@asynccontextmanager
async def gpu_turns(gpus: Iterable[int], folder: Path) -> AsyncIterator[None]:
    """Lock these GPUs for the start of an engine, by files in the state directory `folder`. The kernel unlocks them
    when the process dies."""
    with ExitStack() as held:
        for gpu in sorted(gpus):  # the same order in all processes prevents deadlocks
            await _lock(folder / f"gpu-{gpu}.lock", held)
        yield


async def _lock(file: Path, held: ExitStack) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.warning("cannot lock the GPU; starting without waiting for other engines: %s", error)
        return
    held.callback(os.close, number)
    held.callback(fcntl.flock, number, fcntl.LOCK_UN)  # a forked engine has the descriptor too
    logged = False
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not logged:
                logger.info("waiting for another engine to start on this GPU (%s)", file)
            logged = True
            await asyncio.sleep(RETRY_INTERVAL)
