"""Limits how many prompts a decode worker's engine computes at a time, and their tokens in a step (the chunk).

Each engine step computes a chunk of every prompt in the engine, and decoding waits for all of these chunks. So
the engine gets only as many prompts as fit into one chunk together: one long prompt, or several short ones. The others
wait in a fair queue, so that a request whose KV comes from a prefill worker never waits behind them in the engine. A
very short prompt does not wait for another client's long one."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.contract.slo import is_flex
from pdserve.decode.scheduling.prefill_times import Estimator
from pdserve.engine.base import Engine, Step
from pdserve.queue.prompt_queue import PromptQueue

SHORT = 8
"""A prompt is very short if it has at most the tokens of the usual chunk divided by this."""
MAX_PASSING = 4
"""Very short prompts that may be in the engine beside a full chunk. Their clients have no other prompt there."""
MIN_CHANGE = 8
"""A change of the chunk by less than 1 / `MIN_CHANGE` is not worth the time to set it."""


@dataclass(frozen=True, eq=False)
class _Prompt:
    tokens: int
    client: str
    begins: asyncio.Event = field(default_factory=asyncio.Event)


class PromptSlots:
    def __init__(self, chunk: Callable[[], int], usual: int) -> None:
        """`chunk` returns the tokens of a chunk now; `usual`: its tokens while nothing is decoded; 0: no limit."""
        self._chunk = chunk
        self._short = usual // SHORT
        self._inside: set[_Prompt] = set()
        self._passing: set[_Prompt] = set()
        self._waiting: PromptQueue[_Prompt] = PromptQueue()

    @asynccontextmanager
    async def take(
        self,
        tokens: int,
        client: str = "",
        due: float = math.inf,
        needs: float = 0.0,
        begins: asyncio.Event | None = None,
    ) -> AsyncIterator[bool]:
        """Wait until the engine may compute a prompt of which `tokens` are not cached. The caller leaves the context
        when they are computed. Yields whether the prompt had to wait. `due`: its TTFT deadline; `needs`: seconds from
        its turn to the first token. Setting `begins` ends the wait early."""
        prompt = _Prompt(tokens, client, begins or asyncio.Event())
        self._waiting.add(client, prompt, due, needs)
        self._start_next()
        if not prompt.begins.is_set() and self._may_pass(prompt):
            self._waiting.remove(client, prompt)
            self._passing.add(prompt)
            prompt.begins.set()
        waits = not prompt.begins.is_set()
        try:
            await prompt.begins.wait()
            yield waits
        finally:
            self._waiting.remove(client, prompt)
            self._inside.discard(prompt)
            self._passing.discard(prompt)
            self._start_next()

    def _may_pass(self, prompt: _Prompt) -> bool:
        if prompt.tokens > self._short or is_flex(prompt.client) or len(self._passing) >= MAX_PASSING:
            return False
        return prompt.client not in {each.client for each in self._inside | self._passing}

    def _start_next(self) -> None:
        now, chunk = time.monotonic(), self._chunk()
        while prompt := self._waiting.first(now):
            flex = is_flex(prompt.client)  # flex prompts in the engine keep only flex prompts out
            inside = [each for each in self._inside if flex or not is_flex(each.client)]
            if inside and sum(min(each.tokens, chunk) for each in (*inside, prompt)) > chunk:
                return
            self._waiting.pop(now)
            self._inside.add(prompt)
            prompt.begins.set()


class ChunkLimit:
    """Sets the engine's chunk to the estimator's, so that decoding sequences keep their gap SLO (docs/slo.md)."""

    def __init__(self, engine: Engine, estimator: Estimator) -> None:
        self._engine = engine
        self._estimator = estimator
        self._set = estimator.usual

    async def stepped(self, step: Step) -> None:
        """Adapt the chunk after an engine step whose outputs are recorded."""
        if step.ended:
            self._estimator.stepped(step.ended, step.prompt_tokens)
        usual = self._estimator.usual
        if not usual:
            return
        chunk = self._estimator.chunk
        if chunk != self._set and (chunk == usual or abs(chunk - self._set) * MIN_CHANGE > self._set):
            self._set = chunk
            await self._engine.limit_chunk(chunk)
