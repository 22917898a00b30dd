"""A frontend's connection to one decode worker, and the frontend's requests at that worker."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pdserve.contract.messages import Failed, Load, Submit, ToDecode, ToFrontend
from pdserve.frontend.sequence.generation import Generation
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.errors import PeerGone, ProtocolError


class Link:
    def __init__(
        self, instance: str, changed: Callable[["Link"], None], block_size: int = 0, address: str = ""
    ) -> None:
        """`changed` is called after each change of the requests or of the worker's report."""
        self.instance = instance
        self.block_size = block_size
        self.address = address
        self._changed = changed
        self.generations: dict[str, Generation] = {}
        """by attempt id"""
        self.tokens = 0.0
        """of KV that these generations will need"""
        self.load = Load()
        """the worker's last report"""
        self.new_kv_tokens = 0.0
        """tokens of KV that the requests sent since that report will need"""
        self.new_prompt_tokens = 0
        """prompt tokens of these requests"""
        self._others_kv_tokens = 0
        """tokens of other frontends' requests in that report"""
        self.refused = False
        """whether the worker takes no requests from this frontend"""
        self.round_trip: Callable[[], float | None] = lambda: None
        """seconds, as the stream measures it"""
        self.last_received: Callable[[], float] = lambda: 0.0
        """time of the worker's last bytes"""
        self.created_at = time.monotonic()
        self.silent_checks = 0
        """calls of `check_silence` in a row that found no new bytes"""
        self._seen_received = 0.0
        self._outbox: asyncio.Queue[ToDecode | None] = asyncio.Queue()
        """None ends the link (`cut`)"""

    def add(self, generation: Generation) -> None:
        """Count the generation's current attempt at this worker."""
        self.generations[generation.attempt_id] = generation
        self.tokens += generation.kv_tokens
        self.new_kv_tokens += generation.kv_tokens
        self.new_prompt_tokens += len(generation.prompt)
        self.notify_changed()

    def remove(self, generation: Generation) -> None:
        self.generations.pop(generation.attempt_id, None)
        self.tokens -= generation.kv_tokens
        if not self.generations:  # a worker that becomes idle may send no report
            self.new_kv_tokens = 0.0
            self.new_prompt_tokens = 0
        self.notify_changed()

    def notify_changed(self) -> None:
        """Call after each change that the worker's capacity depends on."""
        self._changed(self)

    def check_silence(self) -> None:
        received = self.last_received()
        self.silent_checks = self.silent_checks + 1 if received == self._seen_received else 0
        self._seen_received = received

    @property
    def requests(self) -> int:
        return len(self.generations)

    def update_load(self, load: Load) -> None:
        ours = sum(len(each.prompt) + len(each.tokens) for each in self.generations.values())
        self.load = load
        self.new_kv_tokens = 0.0
        self.new_prompt_tokens = 0
        self._others_kv_tokens = max(0, load.tokens - ours)
        self.notify_changed()

    def pause_generations(self, count: int) -> None:
        """Preempt up to `count` of the requests at this worker; admission chooses which."""
        generations = self.generations.values()
        permits = {
            each.permit: bool(each.placed and each.placed.begun) for each in generations if each.permit
        }
        if count and permits:
            next(iter(permits)).admission.control.yield_slots(count, permits)

    def outstanding(self, frontends: int) -> float:
        """Estimate the tokens of KV that all requests at the worker need. Assumes that each other frontend has sent as
        much as this one since the last report; otherwise all frontends would choose the same worker."""
        return self.tokens + self._others_kv_tokens + (frontends - 1) * self.new_kv_tokens

    @property
    def starting(self) -> bool:
        """Whether any request at the worker has no token yet."""
        return any(not generation.tokens for generation in self.generations.values())

    def post(self, message: ToDecode) -> None:
        """Queue a message. Never waits and never fails: the listener hears of a lost link. The requests in flight
        bound the outbox."""
        self._outbox.put_nowait(message)

    def cut(self) -> None:
        """End the link, because its worker is gone although another process answers at the address."""
        self._outbox.put_nowait(None)

    async def send(self, client: TcpStreamClient, listener: "LinkListener") -> None:
        """Send posted messages. Raises PeerGone after `cut`. If the worker is gone, this method only returns:
        `client.deliver` passes on the worker's last messages, and then raises."""
        while True:
            if (message := await self._outbox.get()) is None:
                raise PeerGone(self.instance)
            try:
                await client.send(message)
            except PeerGone:
                return
            except ProtocolError as error:
                if isinstance(message, Submit):
                    listener.received(self, Failed(message.request_id, str(error), invalid=True))


class LinkListener(Protocol):
    """Handles the events of all links of a model. No call may raise."""

    def link_up(self, link: Link) -> None: ...

    def received(self, link: Link, message: ToFrontend) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None:
        """The worker will not finish the generations in `link.generations`."""

    def hand_over(self, link: Link, *, begun: bool, stalled: bool = False) -> None:
        """Move the link's generations to other workers, because decode workers are back or this worker is stalled.
        `begun`: also move generations that have tokens of this worker."""
