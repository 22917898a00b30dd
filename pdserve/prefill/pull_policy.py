"""When a worker takes prompts from the queue.

A worker that only prefills takes a prompt whenever its engine has capacity. On a worker of role `both`, a prompt delays
every running stream, so it should go to the worker with the fewest streams. An idle worker waits at the queue and takes
a prompt at once. A worker with streams looks at the queue now and then, and leaves a waiting prompt to workers with
fewer streams for a while: the larger the share of its places that streams hold, the longer, up to the time that a
prompt takes. If all workers are equally busy, waiting longer saves no stream anything.
See docs/decisions/0026-any-worker-can-do-either.md.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.contract.messages import PrefillLoad
from pdserve.engine.base import Engine, Output
from pdserve.prefill.running import RunningPrefills, until
from pdserve.process.learned import PrefillSpeed
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.depth import Puller

PULL_WAIT = 5.0
"""seconds that one pull waits for a request"""
AHEAD = 2
"""engine steps' worth of prompt tokens to have in the engine: then it never waits for the next prompt, and the others
stay in the queue, where another worker can take them"""
FEW = 3
"""prompts of which one step's worth is enough: the next is pulled in the time of a message, which is little beside
them, and another client's prompt may come before it"""
LOOK = 0.1
"""seconds between two looks of a worker with streams at a queue that seems empty"""
FOR_STREAMS = 0.5
"""share of the KV cache that prompts leave to streams. Otherwise two workers, each full of KV that the other has no
space to read, would wait for the end of a lease"""
TICK = 0.02
"""seconds between two checks whether to pull"""
_WEIGHT = 0.2
"""of the newest prompt in `prompt_seconds`"""


def pause(streams: int, places: int, prompt_seconds: float, waiting: int) -> float:
    """Seconds that a worker leaves the queue to others, since its last look or since it knows that prompts are
    `waiting`. Its streams hold so many of its engine's places; a prompt takes `prompt_seconds`. Pure."""
    if not streams:
        return 0.0
    return min(LOOK, max(TICK, prompt_seconds * streams / places)) if waiting else LOOK


@dataclass(frozen=True)
class Beside:
    """Role `both`: the decode half's work in the engine."""

    streams: int = 0
    """requests in the engine, or about to enter"""
    tokens: int = 0
    """tokens of their prompts still to be computed"""


@dataclass(eq=False)
class Pulling:
    instance: str
    engine: Engine
    queue: PrefillQueue
    running: RunningPrefills
    beside: Callable[[], Beside]
    draining: bool = False
    """pull nothing any more"""
    stalled: bool = False
    """the engine hangs: pull nothing until it works again"""
    looked: float = 0.0
    """monotonic time of the last look at the queue"""
    prompt_seconds: float = 0.0
    """mean time of a prompt in the engine"""
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    _known: float = 0.0
    """monotonic time since which prompts are known to be in the queue; 0: none are"""
    _waiting: asyncio.Timeout | None = field(default=None)
    """set while it waits for a prompt"""

    async def next(self) -> list[Delivery]:
        """Wait until the engine has capacity and it is time to poll, then pull a prompt; return an empty list if there
        is none. With streams, take only what is in the queue; without, wait for a prompt until `stop_waiting`. Raises
        QueueUnavailable."""
        await until(lambda: self._has_capacity() and self._is_time(), self.running.changed, TICK)
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
        """Whether the rest of the KV cache is left to the streams."""
        return self.beside().streams > 0 and self.engine.usage.kv_usage > 1.0 - FOR_STREAMS

    def stop_waiting(self) -> None:
        """End a wait for a prompt: the engine has other work now, so another worker should take the next prompt."""
        waiting, self._waiting = self._waiting, None  # once: it may take a while to end
        if waiting is not None:
            waiting.reschedule(0.0)

    def set_stalled(self, stalled: bool) -> None:
        self.stalled = stalled
        if stalled:
            self.stop_waiting()

    def has_time(self) -> bool:
        """Whether the engine is idle and a prompt would be pulled at once."""
        return not (self.draining or self.stalled or self.running) and self.beside() == Beside()

    def learn(self, seconds: float) -> None:
        """A prompt took so many seconds."""
        self.prompt_seconds += _WEIGHT * (seconds - self.prompt_seconds)

    def measure(self, outputs: list[Output]) -> None:
        """Learn the engine's speed from the prompts that a step finished."""
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
        """Whether to pull one more prompt: a full step gains nothing from more, and other workers may be idle."""
        facts, usage, beside = self.engine.facts, self.engine.usage.kv_usage, self.beside()
        if self.draining or self.stalled or self.full:
            return False
        tokens, free = self.running.tokens + beside.tokens, facts.kv_tokens * (1.0 - usage)
        return not tokens or (
            len(self.running) < facts.max_num_seqs
            and tokens < (1 if len(self.running) < FEW else AHEAD) * facts.max_batched_tokens
            and tokens + facts.max_batched_tokens < free
        )
