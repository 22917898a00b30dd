"""Wait until a condition is true, or check that it stays true."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], within: float = 30.0) -> None:
    """Wait until `condition`, a function or coroutine function, is true. Raises TimeoutError after `within` seconds;
    the default is for a busy machine."""
    async with asyncio.timeout(within):
        while True:
            answer = condition()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.005)


async def holds(condition: Callable[[], object], seconds: float = 0.1) -> None:
    """Fail unless `condition` stays true for `seconds`. For tests that something does not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        await asyncio.sleep(0.005)
