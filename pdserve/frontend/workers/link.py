"""One connection to a decode worker, and the requests of this frontend there."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pdserve.contract.messages import Failed, Load, Submit, ToDecode, ToFrontend
from pdserve.frontend.sequence.generation import Generation
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.errors import PeerGone, ProtocolError


class Link:
    """One connection to a decode worker, and the requests of this frontend there."""

    def __init__(self, instance: str, changed: Callable[["Link"], None], block_size: int = 0) -> None:
        """`changed` is called after each change of the requests there, and of what the worker reports."""
        self.instance = instance
        self.block_size = block_size
        self._changed = changed
        self.generations: dict[str, Generation] = {}
        """by attempt id"""
        self.tokens = 0.0
        """tokens of KV that these will need"""
        self.load = Load()
        """the worker's last report"""
        self.new_kv_tokens = 0.0
        """tokens of KV that the requests sent since that report will need"""
        self.new_prompt_tokens = 0
        """tokens of their prompts"""
        self._others_kv_tokens = 0
        """tokens of other frontends' requests in that report"""
        self.refused = False
        """the worker takes no requests from this frontend"""
        self.round_trip: Callable[[], float | None] = lambda: None
        """seconds, as the stream measures it"""
        self.last_received: Callable[[], float] = lambda: 0.0
        """when bytes of the worker last came"""
        self.created_at = time.monotonic()
        self.silent_checks = 0
        """how often in a row `listen` found that none had come"""
        self._seen_received = 0.0
        self._outbox: asyncio.Queue[ToDecode] = asyncio.Queue()

    def add(self, generation: Generation) -> None:
        """Count the generation's attempt among those of the worker."""
        self.generations[generation.attempt_id] = generation
        self.tokens += generation.kv_tokens
        self.new_kv_tokens += generation.kv_tokens
        self.new_prompt_tokens += len(generation.prompt)
        self.notify_changed()

    def remove(self, generation: Generation) -> None:
        self.generations.pop(generation.attempt_id, None)
        self.tokens -= generation.kv_tokens
        if not self.generations:  # a worker that is idle again may report nothing
            self.new_kv_tokens, self.new_prompt_tokens = 0.0, 0
        self.notify_changed()

    def notify_changed(self) -> None:
        """Call after each change of what the worker's capacity depends on."""
        self._changed(self)

    def check_silence(self) -> None:
        heard, before = self.last_received(), self._seen_received
        self.silent_checks, self._seen_received = self.silent_checks + 1 if heard == before else 0, heard

    @property
    def requests(self) -> int:
        return len(self.generations)

    def update_load(self, load: Load) -> None:
        ours = sum(
            len(generation.prompt) + len(generation.tokens) for generation in self.generations.values()
        )
        self.load = load
        self.new_kv_tokens = 0.0
        self.new_prompt_tokens = 0
        self._others_kv_tokens = max(0, load.tokens - ours)
        self.notify_changed()

    def pause_generations(self, count: int) -> None:
        """Pause so many of the generations there."""
        here = self.generations.values()
        permits = {each.permit: bool(each.placed and each.placed.begun) for each in here if each.permit}
        if count and permits:
            next(iter(permits)).admission.control.yield_slots(count, permits)

    def outstanding(self, frontends: int) -> float:
        """About how many tokens of KV all requests at the worker need. Each other frontend is taken to have sent as
        much as this one since the last report: otherwise all frontends would choose the same worker."""
        return self.tokens + self._others_kv_tokens + (frontends - 1) * self.new_kv_tokens

    @property
    def starting(self) -> bool:
        """Whether any of its generations has no token yet."""
        return any(not generation.tokens for generation in self.generations.values())

    def post(self, message: ToDecode) -> None:
        """Send, in order; never waits and never fails: the listener is told of a lost link. The outbox is bounded by
        the requests in flight, and these by the workers' capacity."""
        self._outbox.put_nowait(message)

    async def send(self, client: TcpStreamClient, listener: "LinkListener") -> None:
        """Send what is posted until the worker is gone. Do not raise then: the client goes on delivering the worker's
        last messages, which say at which requests its engine died, and raises after these."""
        while True:
            message = await self._outbox.get()
            try:
                await client.send(message)
            except PeerGone:
                return
            except ProtocolError as error:
                if isinstance(message, Submit):
                    listener.received(self, Failed(message.request_id, str(error), invalid=True))


class LinkListener(Protocol):
    """Is told of every event on the links; no call may raise."""

    def link_up(self, link: Link) -> None: ...

    def received(self, link: Link, message: ToFrontend) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None:
        """The generations still in `link.generations` will not be answered."""

    def hand_over(self, link: Link, *, begun: bool, stalled: bool = False) -> None:
        """Decode workers are back, or the worker is stalled and others are not: move the link's generations there,
        those that have tokens of it only if `begun`."""
