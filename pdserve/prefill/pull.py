"""When a worker takes prompts from the queue.

A worker that only prefills does whenever its engine has capacity. For a worker that also decodes, a prompt that is
computed beside streams holds up each of them, so that it is best taken by the worker with the fewest. An idle worker
waits at the queue and takes it at once. A worker with streams looks at what is there, and leaves a prompt that it knows
of to workers with fewer streams first: the more of its places streams hold, the longer, up to the time that a prompt
takes. No longer: where all are as busy, waiting saves no stream anything.
See docs/decisions/0026-any-worker-can-do-either.md.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.base import Engine, Output
from pdserve.messages import PrefillLoad
from pdserve.prefill.running import RunningPrefills
from pdserve.process.learned import PrefillSpeed
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.depth import Puller

PULL_WAIT = 5.0
"""seconds that one pull waits for a request"""
AHEAD = 2
"""engine steps' worth of prompt tokens to have in the engine: it never waits for the next request, and what
is queued stays where another worker can take it"""
LOOK = 0.1
"""seconds after which a worker with streams looks for prompts that it does not know of"""
FOR_STREAMS = 0.5
"""share of the KV cache. Two workers whose caches are full of KV that the other is to read, and has no space for, would
wait for the end of a lease."""
TICK = 0.02
"""seconds between two thoughts of the queue while it takes nothing from there"""
_WEIGHT = 0.2
"""of the newest prompt in the mean of their seconds"""


def pause(streams: int, places: int, prompt_seconds: float, waiting: int) -> float:
    """Seconds that a worker leaves the queue to others, with streams in so many of the places of its engine, where a
    prompt takes `prompt_seconds`: since it last looked, or since it knows that prompts are `waiting`. Pure."""
    if not streams:
        return 0.0
    return min(LOOK, max(TICK, prompt_seconds * streams / places)) if waiting else LOOK


@dataclass(frozen=True)
class Beside:
    """What an engine has to do beside the prompts from the queue."""

    streams: int = 0
    """requests that are being decoded, or will be"""
    tokens: int = 0
    """of those of their prompts that are still to be computed"""


@dataclass(eq=False)
class Pulling:
    instance: str
    engine: Engine
    queue: PrefillQueue
    running: RunningPrefills
    beside: Callable[[], Beside]
    draining: bool = False
    """true: takes nothing new"""
    looked: float = 0.0
    """when it last did; monotonic"""
    prompt_seconds: float = 0.0
    """of an average prompt in the engine"""
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    _known: float = 0.0
    """monotonic: since when prompts are known to be in the queue; 0: none are"""
    _waiting: asyncio.Timeout | None = field(default=None)
    """there while it waits for a prompt"""

    async def next(self) -> list[Delivery]:
        """Wait for capacity and time, and look into the queue: of a busy worker only at what is there, else until a
        prompt comes or something else to do. Raises QueueUnavailable."""
        await self.running.until(lambda: self._has_capacity() and self._is_time(), TICK)
        wait = PULL_WAIT if self.beside() == Beside() else 0.0
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting = waiting if wait else None
                return await self.queue.pull(1, wait, Puller(self.instance, self._load))
        except TimeoutError:
            return []
        finally:
            self.looked, self._waiting = time.monotonic(), None

    @property
    def full(self) -> bool:
        """The KV cache is left to the streams."""
        return self.beside().streams > 0 and self.engine.usage.kv_usage > 1.0 - FOR_STREAMS

    def stop_waiting(self) -> None:
        """The engine has something to do: the next prompt is better taken elsewhere."""
        waiting, self._waiting = self._waiting, None  # it may take a while to leave, and is told once
        if waiting is not None:
            waiting.reschedule(0.0)

    def has_time(self) -> bool:
        """Whether a prompt would be all that it has to do."""
        return not (self.draining or self.running) and self.beside() == Beside()

    def learn(self, seconds: float) -> None:
        """A prompt took so long."""
        self.prompt_seconds += _WEIGHT * (seconds - self.prompt_seconds)

    def measure(self, outputs: list[Output]) -> None:
        """Of an engine step: what it says of the speed."""
        done = [self.running.of_engine(output.request_id) for output in outputs if output.handle]
        if prompts := [running for running in done if running is not None and not running.request.warm_up]:
            tokens = sum(len(running.request.prompt) for running in prompts)
            self.speed.done(tokens, min(running.started for running in prompts), time.monotonic())

    def _load(self) -> PrefillLoad:
        tokens = self.running.tokens + self.beside().tokens
        return PrefillLoad(tokens, self.speed.token_seconds.value or 0.0)

    def _is_time(self) -> bool:
        now, waiting = time.monotonic(), self.queue.depth
        self._known = (self._known or now) if waiting else 0.0
        wait = pause(self.beside().streams, self.engine.facts.max_num_seqs, self.prompt_seconds, waiting)
        return now >= max(self.looked, self._known) + wait

    def _has_capacity(self) -> bool:
        """One request at a time: batching prompts gains nothing once a step is full, and other workers may be idle."""
        facts, usage, beside = self.engine.facts, self.engine.usage.kv_usage, self.beside()
        if self.draining or self.full:
            return False
        tokens, free = self.running.tokens + beside.tokens, facts.kv_tokens * (1.0 - usage)
        return not tokens or (
            len(self.running) < facts.max_num_seqs
            and tokens < AHEAD * facts.max_batched_tokens
            and tokens + facts.max_batched_tokens < free
        )
