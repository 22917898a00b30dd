"""Waiting for what a test expects to become true."""

import asyncio
import inspect
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
