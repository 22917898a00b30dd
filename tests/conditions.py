"""Wait until a condition is true, or check that it stays true."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], within: float = 30.0) -> None:
    """Raise TimeoutError when `condition`, a function or coroutine function, does not hold within so many seconds. The
    default is for a busy machine: a test that passes does not wait for it."""
    async with asyncio.timeout(within):
        while True:
            answer = condition()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.005)


async def holds(condition: Callable[[], object], seconds: float = 0.1) -> None:
    """Fail if `condition` does not hold for so many seconds: for what must not happen, though nothing tells when it
    would have."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        await asyncio.sleep(0.005)
