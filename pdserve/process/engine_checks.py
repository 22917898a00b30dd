"""A worker's checks of its engine: KV blocks against the plan, a self-test before the worker is announced, and a watch
for stalls and hangs.

An engine that hangs looks alive from outside: its process exists, and the worker keeps its heartbeats and lease. After
2 s the engine is stalled, and its worker gets no new requests. After 30 s it is killed
(docs/decisions/0098-stalled-workers.md)."""

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence

from pdserve.config.schema import Config
from pdserve.engine.base import Engine, EngineFacts
from pdserve.plan.machine import gpus_compute
from pdserve.plan.plan import worker_memory
from pdserve.plan.slots import Slot
from pdserve.util.errors import EngineDead
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)

PROBE_INTERVAL = 0.5
"""Seconds between two probes."""
STALLS_AFTER = 2.0
"""Seconds without a reply, with almost no CPU time and with idle GPUs, after which an engine is stalled."""
HANGS_AFTER = 30.0
"""Seconds without a reply, with almost no CPU time, after which an engine is killed. An engine replies between two
steps. If a step takes long, it uses CPU time."""
SPINS_AFTER = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 300))
"""Seconds without a reply after which an engine is killed even if it uses CPU time: vLLM's own bound for a step."""
BUSY = 0.1
"""Share of a core that counts as work; an idle vLLM engine on the CPU uses 0.03."""
TICK = 0.25
"""Seconds between two checks of an engine that has not replied."""
REACH_INTERVAL = 10.0
"""Seconds between two probes of a prefill engine's side channel, a port where decode engines ask how to read its KV."""
MAX_UNREACHED = 3
"""Failed probes of the side channel in a row after which the worker ends."""
DEATH_NOTICED_WITHIN = 5.0
"""Maximum of seconds from the death of an engine to its discovery."""
MIN_PROMPT_SPEED = 500.0
"""Prompt tokens per second of the slowest engine."""
TOLERANCE = 0.2
"""Relative difference between found and planned KV blocks above which a warning is logged."""
STEPS = 3
"""Tokens of a self-test: the first comes from the prefill, the others from decode steps."""
_IDS = range(16, 256)
"""Token ids that every vocabulary has."""


# memory


def log_memory(config: Config, slot: Slot, facts: EngineFacts) -> None:
    """Compare the engine's KV blocks with the plan's. Simulated engines and models of unknown size have no plan."""
    planned = worker_memory(config, slot)
    if planned is None or planned.kv_space is None:
        return
    factor = facts.kv_blocks / planned.blocks if planned.blocks else float("inf")
    off = abs(factor - 1) > TOLERANCE
    logger.log(
        logging.WARNING if off else logging.INFO,
        "KV blocks, found / planned: %s / %s (x %.2f)%s",
        f"{facts.kv_blocks:,}",
        f"{planned.blocks:,}",
        factor,
        "; docs/memory.md has the terms" * off,
    )


# first work


async def self_test(engine: Engine) -> None:
    """Let the engine compute a prompt and some tokens, so that the cost and failures of a first prefill and step come
    before the first request. Call it before other code reads the engine's steps. Raises EngineDead if the engine
    dies, fails or hangs."""
    began = time.monotonic()
    work = asyncio.ensure_future(_first_tokens(engine))
    watch = asyncio.ensure_future(EngineWatch(engine).run())
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            watch.result()
        work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    if not await engine.all_blocks_free():
        logger.warning("KV blocks are still held after the engine's self-test")
    logger.info("the engine's self-test took %.2f s", time.monotonic() - began)


def unique_prompt(facts: EngineFacts) -> list[int]:
    """A random prompt, which is in no prefix cache and slightly longer than a KV block."""
    length = min(facts.block_size + 2, facts.max_model_len - STEPS - 1, facts.kv_tokens - STEPS - 1)
    chance = random.SystemRandom()
    return [chance.choice(_IDS) for _ in range(max(1, length))]


async def _first_tokens(engine: Engine) -> None:
    name = f"self-test-{secrets.token_hex(4)}"
    await engine.generate(name, unique_prompt(engine.facts), engine.plain_body(STEPS), None)
    finished = False
    while not finished:
        for output in (await engine.step()).outputs:
            if output.failed:
                raise EngineDead("the engine failed its first request")
            finished |= output.finished


# liveness


class EngineWatch:
    def __init__(self, engine: Engine, gpus: Collection[int] = ()) -> None:
        """`gpus`: the engine's GPUs, by their NVML indices."""
        self.stalled = False
        """The engine neither replies nor computes."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of `stalled`."""
        self._engine = engine
        self._gpus = gpus
        self._gpu_query: asyncio.Future[bool] | None = None
        """Call of NVML, which may hang together with the engine."""

    async def run(self) -> None:
        """Probe the engine; raises EngineDead when it hangs or is dead."""
        while True:
            await tick(PROBE_INTERVAL)
            await self._probe()

    async def _probe(self) -> None:
        """Wait for a reply. Time is counted in ticks, so that a pause of both worker and engine does not count."""
        probe, used = asyncio.ensure_future(self._engine.probe()), [self._engine.cpu_seconds()]
        try:
            while not probe.done():
                await asyncio.wait([probe], timeout=TICK)
                used.append(self._engine.cpu_seconds())
                silent = (len(used) - 1) * TICK
                if not probe.done() and _idle(used, HANGS_AFTER):
                    raise EngineDead(f"it hangs: no reply for {HANGS_AFTER:g} s, without CPU time")
                if not probe.done() and silent >= SPINS_AFTER:
                    raise EngineDead(f"it hangs: no reply for {silent:g} s, though it uses CPU time")
                stalled = not probe.done() and _idle(used, STALLS_AFTER) and not await self._gpus_compute()
                self._set_stalled(stalled and not probe.done())
            probe.result()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    def _set_stalled(self, stalled: bool) -> None:
        if stalled == self.stalled:
            return
        self.stalled = stalled
        if stalled:
            logger.warning("engine stalled: it neither replies nor computes; no new requests until it does")
        else:
            logger.info("engine works again; taking new requests")
        self.on_change()

    async def _gpus_compute(self) -> bool:
        """Whether a GPU of the engine computes. vLLM's processes use no CPU time while they wait for a GPU
        (`cudaEventBlockingSync`). True also if NVML does not reply within a tick."""
        if not self._gpus:
            return False
        if self._gpu_query is None or self._gpu_query.done():
            self._gpu_query = asyncio.get_running_loop().run_in_executor(None, gpus_compute, self._gpus)
        await asyncio.wait([self._gpu_query], timeout=TICK)
        return not self._gpu_query.done() or self._gpu_query.result()


def _idle(used: Sequence[float], seconds: float) -> bool:
    """Whether an engine used almost no CPU time in the last `seconds`. `used`: its CPU seconds at each tick."""
    ticks = round(seconds / TICK)
    return len(used) > ticks and used[-1] - used[-1 - ticks] < BUSY * seconds


async def watch_side_channel(engine: Engine) -> None:
    """Probe a prefill engine's side channel. Raises EngineDead after `MAX_UNREACHED` failures in a row: decode engines
    then cannot read the KV."""
    failures = 0
    while True:
        await asyncio.sleep(REACH_INTERVAL)
        try:
            await engine.reach()
        except TimeoutError as error:
            failures += 1
            logger.warning("%s (failure %d of %d)", error, failures, MAX_UNREACHED)
            if failures >= MAX_UNREACHED:
                raise EngineDead(f"its KV cannot be read: {error}") from error
        else:
            failures = 0


def may_have_killed(prompt_tokens: int, since: float) -> bool:
    """Whether a request may have crashed an engine that is found dead now. `since`: monotonic time of the request's
    start or last token."""
    return time.monotonic() - since < DEATH_NOTICED_WITHIN + prompt_tokens / MIN_PROMPT_SPEED
