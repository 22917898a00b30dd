"""Engines on one GPU start one after the other: vLLM measures what it needs as what the whole card has lost meanwhile,
and would count another engine's weights as its own (`gpu_worker.determine_available_memory`)."""

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK = 0.1
"""seconds between two tries"""


@asynccontextmanager
async def gpu_turns(gpus: Iterable[int], folder: Path) -> AsyncIterator[None]:
    """Hold these GPUs against other engines that start, of processes with the same state directory (`folder`), which
    units of one host share, unlike /tmp. The kernel lets go for a process that dies."""
    with ExitStack() as held:
        for gpu in sorted(gpus):  # in the same order everywhere
            await _lock(folder / f"gpu-{gpu}.lock", held)
        yield


async def _lock(file: Path, held: ExitStack) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.warning("cannot wait for other engines that start on this GPU: %s", error)
        return
    held.callback(os.close, number)
    held.callback(fcntl.flock, number, fcntl.LOCK_UN)  # an engine that was forked meanwhile has the file too
    waits = False
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not waits:
                logger.info("another engine starts on this GPU: this one is next (%s)", file)
            waits = True
            await asyncio.sleep(LOOK)
