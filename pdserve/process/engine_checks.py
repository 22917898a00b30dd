"""What a worker checks of its engine: that it has the KV blocks that were planned, that it can do its work before the
worker is announced, and from then on that it does not hang.

An engine that hangs (stopped, or deadlocked in a lock or a kernel) looks alive from outside: its process is there, and
the worker's own heartbeats and lease go on. After seconds it is stalled: its worker gets no new requests until it works
again. After half a minute it is killed (docs/decisions/0098-stalled-workers.md)."""

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

logger = logging.getLogger(__name__)

PROBE_INTERVAL = 0.5
"""seconds between two probes"""
STALLS_AFTER = 2.0
"""seconds without an answer, almost without CPU time, and with idle GPUs after which an engine is stalled"""
HANGS_AFTER = 30.0
"""seconds without an answer and almost without CPU time after which an engine counts as hung. Engines answer between
two steps, and a step may take long: a long prompt on a CPU, a kernel that is compiled on its first use. But such a
step uses CPU time."""
SPINS_AFTER = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 300))
"""seconds without an answer after which an engine counts as hung, however much CPU time it uses: vLLM's own bound for a
step, which vLLM enforces only where its worker has a process of its own"""
BUSY = 0.1
"""share of a core that counts as work; an idle vLLM engine on the CPU uses 0.03"""
TICK = 0.25
"""seconds between two looks at an engine that owes an answer"""
REACH_INTERVAL, MAX_UNREACHED = 10.0, 3
"""seconds between two probes of a prefill engine's side channel, and how many in a row may fail"""
KILLS_WITHIN = 5.0
"""seconds within which an engine that a request crashes is known to be dead"""
SLOWEST = 500.0
"""prompt tokens per second, at least: a prompt may crash the engine at its end"""
TOLERANCE = 0.2
"""share of the planned KV blocks by which those of the engine may differ without a warning"""
STEPS = 3
"""tokens of a self-test: the first comes from the prefill, the others from decode steps"""
_IDS = range(16, 256)
"""token ids that every vocabulary has"""


# memory


def log_memory(config: Config, slot: Slot, facts: EngineFacts) -> None:
    """Compare the KV blocks that vLLM found room for with the plan's, if there is one: not for simulated engines or
    models of unknown size. vLLM itself logs the parts of an engine's memory."""
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
    """Let the engine compute a prompt and some tokens, so that what only happens at a first prefill or step has
    happened, or failed, before the first request. Call it before anything else reads the engine's steps. Raises
    EngineDead where the engine dies, fails or hangs."""
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
    logger.info("the engine did its first work in %.2f s", time.monotonic() - began)


def unique_prompt(facts: EngineFacts) -> list[int]:
    """A random prompt, in no prefix cache, a bit longer than a KV block."""
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
        """`gpus`: their indices, as NVML counts."""
        self.stalled = False
        """the engine neither answers nor computes"""
        self.on_change: Callable[[], None] = lambda: None
        """called after each change of `stalled`"""
        self._engine, self._gpus = engine, gpus
        self._look: asyncio.Future[bool] | None = None
        """asks NVML, which may hang together with the engine"""

    async def run(self) -> None:
        """Probe the engine until it hangs or is dead; raises EngineDead then."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            await self._until_it_answers()

    async def _until_it_answers(self) -> None:
        """Count ticks instead of measuring time, because a worker that was stopped together with its engine must not
        blame the engine when both go on."""
        probe, used = asyncio.ensure_future(self._engine.probe()), [self._engine.cpu_seconds()]
        try:
            while not probe.done():
                await asyncio.wait([probe], timeout=TICK)
                used.append(self._engine.cpu_seconds())
                silent = (len(used) - 1) * TICK
                if not probe.done() and _idle(used, HANGS_AFTER):
                    raise EngineDead(
                        f"it hangs: no answer for {HANGS_AFTER:g} s, in which it computed nothing"
                    )
                if not probe.done() and silent >= SPINS_AFTER:
                    raise EngineDead(
                        f"it hangs: no answer for {silent:g} s, in which it computed without end"
                    )
                stalled = not probe.done() and _idle(used, STALLS_AFTER) and not await self._gpus_compute()
                self._note(stalled and not probe.done())
            probe.result()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    def _note(self, stalled: bool) -> None:
        if stalled == self.stalled:
            return
        self.stalled = stalled
        if stalled:
            logger.warning("engine stalled: it neither answers nor computes; no new requests until it does")
        else:
            logger.info("engine works again")
        self.on_change()

    async def _gpus_compute(self) -> bool:
        """Whether a GPU of the engine computes. vLLM's processes sleep while it does (`cudaEventBlockingSync`), so that
        a long step uses no CPU time. True also where NVML does not answer within a tick: nothing is known then."""
        if not self._gpus:
            return False
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().run_in_executor(None, gpus_compute, self._gpus)
        await asyncio.wait([self._look], timeout=TICK)
        return not self._look.done() or self._look.result()


def _idle(used: Sequence[float], seconds: float) -> bool:
    """Whether an engine computed almost nothing in the last `seconds`. `used`: its CPU seconds at each tick."""
    ticks = round(seconds / TICK)
    return len(used) > ticks and used[-1] - used[-1 - ticks] < BUSY * seconds


async def watch_side_channel(engine: Engine) -> None:
    """Probe a prefill engine's side channel; raises EngineDead where it does not answer: no decode engine could read
    the KV then, and only a new process is sure to have a working one."""
    failures = 0
    while True:
        await asyncio.sleep(REACH_INTERVAL)
        try:
            await engine.reach()
        except TimeoutError as error:
            failures += 1
            logger.warning("%s (%d of %d)", error, failures, MAX_UNREACHED)
            if failures >= MAX_UNREACHED:
                raise EngineDead(f"its KV cannot be read: {error}") from error
        else:
            failures = 0


def may_have_killed(prompt_tokens: int, since: float) -> bool:
    """Whether an engine that is found dead now may have died of a request whose last sign of progress (its start, or a
    token) was at `since` (monotonic)."""
    return time.monotonic() - since < KILLS_WITHIN + prompt_tokens / SLOWEST
