"""Decides when a worker pulls prompts from the prefill queue.

A prefill worker pulls whenever its engine has capacity. On a worker of role `both`, a prompt delays every sequence that
is decoded, so it should go to the worker that decodes the fewest. A worker that decodes none waits at the queue and
gets a prompt at once. Any other worker polls the queue, and leaves a waiting prompt to the rest for a moment. The more
of its slots are taken, the longer it does so (`pause`; docs/decisions/0026-any-worker-can-do-either.md)."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.contract.messages import PrefillLoad
from pdserve.engine.base import Engine, Output
from pdserve.prefill.addressed import AddressedPrompt, AddressedPrompts
from pdserve.prefill.running import RunningPrefills, until
from pdserve.process.learned import PrefillSpeed
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.depth import Puller

PULL_WAIT = 5.0
"""Maximum of seconds that a pull waits for a prompt."""
STEPS_AHEAD = 2
"""A worker pulls until its engine has the prompt tokens of this many steps."""
FEW_PROMPTS = 3
"""With fewer prompts than this in the engine, the tokens of one step are enough: a pull is much faster than a step."""
POLL_INTERVAL = 0.1
"""Seconds between two pulls of a worker that decodes, from a queue that seems empty."""
DECODE_SHARE = 0.5
"""A worker that decodes pulls no prompt while less than this share of its KV cache is free. Otherwise two workers full
of prompts' KV would have no space to read each other's."""
TICK = 0.02
"""Seconds between two checks whether to pull."""
_WEIGHT = 0.2
"""Weight of the newest prompt in `prompt_seconds`."""


def pause(streams: int, slots: int, prompt_seconds: float, waiting: int) -> float:
    """Return the seconds for which a worker that decodes `streams` sequences leaves the queue's `waiting` prompts to
    others. `slots`: those of its engine; `prompt_seconds`: mean time of a prompt there. Pure."""
    if not streams:
        return 0.0
    return min(POLL_INTERVAL, max(TICK, prompt_seconds * streams / slots)) if waiting else POLL_INTERVAL


@dataclass(frozen=True)
class DecodeLoad:
    """Role `both`: the decode half's work in the engine."""

    streams: int = 0
    """Requests in the engine, or about to enter."""
    tokens: int = 0
    """Tokens of their prompts still to be computed."""


@dataclass(eq=False)
class Pulling:
    instance: str
    engine: Engine
    queue: PrefillQueue
    running: RunningPrefills
    decode_load: Callable[[], DecodeLoad]
    draining: bool = False
    stalled: bool = False
    """Whether the engine makes no progress; the worker pulls nothing until it does."""
    pulled: float = 0.0
    """Monotonic time of the last pull."""
    prompt_seconds: float = 0.0
    """Mean time of a prompt in the engine."""
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    addressed: AddressedPrompts = field(default_factory=AddressedPrompts)
    _addressed_turn: int = 1
    """Tokens of addressed prompts to begin before the next pull: as many as the last pulled prompts had, or 1."""
    _seen_since: float = 0.0
    """Monotonic time since which the queue has prompts; 0: it has none."""
    _waiting: asyncio.Timeout | None = field(default=None)
    """Set while `next` waits for a prompt."""

    async def next(self) -> list[Delivery]:
        """Wait until the engine has capacity and the pause is over. Then take an addressed prompt or one of the queue,
        by turns. Return an empty list if there is none. A worker without other work waits at the queue for `PULL_WAIT`,
        or until `stop_waiting`. Raises QueueUnavailable."""
        await until(lambda: self._has_capacity() and self._is_time(), self.running.changed, TICK)
        if self._addressed_turn > 0 and (prompt := self.addressed.pop(flex=False)):
            self._addressed_turn -= prompt.tokens
            return [prompt]
        self._addressed_turn = 1  # also if the queue fails
        if pulled := await self._pull():
            self._addressed_turn = sum(len(delivery.request.prompt) for delivery in pulled)
        if not pulled and self._has_capacity() and (prompt := self.addressed.pop(flex=True)):
            return [prompt]
        return pulled

    async def _pull(self) -> list[Delivery]:
        wait = PULL_WAIT if self.decode_load() == DecodeLoad() and not self.addressed else 0.0
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting = waiting if wait else None
                return await self.queue.pull(1, wait, self.puller)
        except TimeoutError:
            return []
        finally:
            self.pulled, self._waiting = time.monotonic(), None

    def receive(self, prompt: AddressedPrompt) -> bool:
        """Take an addressed prompt. Return whether to begin it at once, because this worker waits at the queue and has
        capacity. Otherwise the prompt waits for its turn."""
        if self._waiting is not None and self._has_capacity():
            return True
        self.stop_waiting()  # the end of the wait may come long after the engine has capacity again
        self.addressed.add(prompt, self.speed.token_seconds.value or 0.0)
        self.running.changed.set()
        return False

    def begun(self) -> None:
        """Stop waiting at the queue if the prompt that was begun leaves no capacity."""
        if not self._has_capacity():
            self.stop_waiting()

    @property
    def full(self) -> bool:
        """Whether this worker decodes, and its KV cache has no room for another prompt (`DECODE_SHARE`)."""
        return self.decode_load().streams > 0 and self.engine.usage.kv_usage > 1.0 - DECODE_SHARE

    def stop_waiting(self) -> None:
        """End a wait for a prompt, so that another worker gets it: the engine has other work now, or is stalled."""
        waiting, self._waiting = self._waiting, None  # reschedule it only once: it may take a while to end
        if waiting is not None:
            waiting.reschedule(0.0)

    def set_stalled(self, stalled: bool) -> None:
        self.stalled = stalled
        if stalled:
            self.stop_waiting()

    def is_idle(self) -> bool:
        """Whether the engine is idle and a prompt would be pulled at once."""
        return not (self.draining or self.stalled or self.running) and self.decode_load() == DecodeLoad()

    def learn(self, seconds: float) -> None:
        self.prompt_seconds += _WEIGHT * (seconds - self.prompt_seconds)

    def measure(self, outputs: list[Output]) -> None:
        """Learn the engine's speed from the prompts that a step finished."""
        done = [self.running.of_engine(output.request_id) for output in outputs if output.handle]
        if prompts := [running for running in done if running is not None and not running.request.warm_up]:
            tokens = sum(running.tokens for running in prompts)
            self.speed.done(tokens, min(running.started for running in prompts), time.monotonic())

    @property
    def puller(self) -> Puller:
        return Puller(self.instance, self.load)

    def load(self) -> PrefillLoad:
        tokens = self.running.tokens + self.addressed.tokens + self.decode_load().tokens
        return PrefillLoad(tokens, self.speed.token_seconds.value or 0.0)

    def _is_time(self) -> bool:
        now, waiting = time.monotonic(), self.queue.depth
        self._seen_since = (self._seen_since or now) if waiting else 0.0
        wait = pause(self.decode_load().streams, self.engine.facts.max_num_seqs, self.prompt_seconds, waiting)
        return now >= max(self.pulled, self._seen_since) + wait

    def _has_capacity(self) -> bool:
        """Whether to pull one more prompt."""
        facts, usage = self.engine.facts, self.engine.usage.kv_usage
        if self.draining or self.stalled or self.full:
            return False
        tokens, free = self.running.tokens + self.decode_load().tokens, facts.kv_tokens * (1.0 - usage)
        return not tokens or (
            len(self.running) < facts.max_num_seqs
            and tokens < (1 if len(self.running) < FEW_PROMPTS else STEPS_AHEAD) * facts.max_batched_tokens
            and tokens + facts.max_batched_tokens < free
        )
