"""Addressed prompts: decode workers sent them only to this prefill worker, because it has their prefixes cached.

They bypass the JetStream queue and wait here, in a fair queue, until the engine has capacity. If a prompt has not begun
after `begin_within`, this worker drops it, and its decode worker publishes it for any worker
(docs/decisions/0128-prefill-where-the-prefix-is.md)."""

import math
import time
from collections.abc import Iterable
from contextlib import suppress

from pdserve.contract.messages import RETURNED, PrefillFailed, PrefillRequest, QueueState
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.prompt_queue import PromptQueue
from pdserve.util.errors import QueueUnavailable


class AddressedPrompt(Delivery):
    def __init__(self, request: PrefillRequest, queue: PrefillQueue, worker: str, cached: int = 0) -> None:
        """`worker`: id of the prefill worker; `cached`: prompt tokens in its prefix cache."""
        super().__init__(request)
        self.tokens = len(request.prompt) - cached
        """Prompt tokens to compute."""
        self.state = QueueState(0, 0, worker)
        """Names this worker; the numbers of the queue are not known."""
        self._queue = queue
        self.arrived = time.monotonic()
        self.last_start = self.arrived + request.begin_within
        """Monotonic time after which this worker must not begin the prompt."""

    async def give_back(self) -> None:
        """Let the decode worker publish the prompt for any worker."""
        with suppress(QueueUnavailable):
            returned = PrefillFailed(self.request.request_id, RETURNED)
            await self._queue.answer(self.request.decode, returned)


class AddressedPrompts:
    def __init__(self) -> None:
        self._waiting: PromptQueue[AddressedPrompt] = PromptQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens that the waiting prompts need computed."""
        return sum(prompt.tokens for prompt in self._waiting)

    def add(self, prompt: AddressedPrompt, token_seconds: float) -> None:
        request = prompt.request
        due = math.inf if request.due is None else prompt.arrived + request.due
        self._waiting.add(request.client, prompt, due, prompt.tokens * token_seconds)

    def pop(self, *, flex: bool) -> AddressedPrompt | None:
        """Take the next prompt that may still begin; without `flex`, no flex prompt."""
        now = time.monotonic()
        while (self._waiting.regular or flex) and self._waiting:
            prompt = self._waiting.pop(now)
            if now < prompt.last_start:
                prompt.queued = now - prompt.arrived
                return prompt
        return None

    def cancel(self, request_ids: Iterable[str]) -> None:
        for prompt in [each for each in self._waiting if each.request.request_id in request_ids]:
            self._waiting.remove(prompt.request.client, prompt)

    async def give_back(self) -> None:
        while self._waiting:
            await self._waiting.pop(time.monotonic()).give_back()
