"""Whether the engine works. One that hangs (stopped, or deadlocked in a lock or a kernel) looks alive to everybody
else: its process is there, and the worker's own heartbeats and lease go on."""

import asyncio
import logging
import time

from pdserve.engine.base import Engine
from pdserve.errors import EngineDead

log = logging.getLogger(__name__)

EVERY = 5.0
"""seconds between two questions"""
SILENCE = 30.0
"""seconds without an answer, and without CPU time to speak of, after which an engine hangs. Engines answer
between two steps, and how long a step may take nobody knows: a long prompt on a CPU, a kernel that is compiled
on its first use. But whoever is at that uses CPU time. What spins without end is left to vLLM, which gives a
step up after 300 s."""
BUSY = 0.1
"""share of a core that counts as work; an idle vLLM engine on the CPU takes 0.03"""
TICK = 1.0
REACH_EVERY, MAX_UNREACHED = 10.0, 3
"""seconds between two looks at a prefill engine's side channel, and how many in a row may fail"""
AT_ONCE = 5.0
"""seconds within which an engine that a request kills is dead, and known to be: a crash, and not a hang"""
SLOWEST = 500.0
"""prompt tokens per second: a prompt may need its time until it is where it kills"""


def may_have_killed(prompt_tokens: int, since: float) -> bool:
    """Whether an engine that is found dead now may have died of a request that it got, or gave the last token of, at
    `since` (monotonic)."""
    return time.monotonic() - since < AT_ONCE + prompt_tokens / SLOWEST


async def watch_engine(engine: Engine) -> None:
    """For ever, or until EngineDead."""
    while True:
        await asyncio.sleep(EVERY)
        await _until_it_answers(engine)


async def watch_side_channel(engine: Engine) -> None:
    """For ever, or until EngineDead. A prefill engine that no decode engine can ask for its KV computes for nothing,
    and only a new process is sure to have a side channel."""
    failures = 0
    while True:
        await asyncio.sleep(REACH_EVERY)
        try:
            await engine.reach()
        except TimeoutError as error:
            failures += 1
            log.warning("%s (%d of %d)", error, failures, MAX_UNREACHED)
            if failures >= MAX_UNREACHED:
                raise EngineDead(f"its KV cannot be read: {error}") from error
        else:
            failures = 0


async def _until_it_answers(engine: Engine) -> None:
    asking = asyncio.ensure_future(engine.probe())
    try:
        while not asking.done():
            used = engine.cpu_seconds()
            await _wait(asking)
            if not asking.done() and engine.cpu_seconds() - used < BUSY * SILENCE:
                raise EngineDead(f"it hangs: no answer for {SILENCE:g} s, in which it computed nothing")
        asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _wait(asking: "asyncio.Future[None]") -> None:
    """For `SILENCE`, in ticks that are counted and not measured: a worker that was stopped together with its engine
    must not blame the engine when both go on."""
    silent = 0.0
    while silent < SILENCE and not asking.done():
        await asyncio.wait([asking], timeout=TICK)
        silent += TICK
