"""Who waits for a turn at a model: a fair line in front of the room that its decode workers have.

Turns go round the clients, counted in tokens (self-clocked fair queueing): each of a client's tickets has its place
as many tokens as it is large behind the one before, and the first one behind the place that is served now; the
lowest is next. So who sends one request goes before the second one of who sends a thousand. Who would be served too
late is told at once, and where too many wait, whoever would be served last must go.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Callable

from pdserve import clock
from pdserve.config.schema import Limits
from pdserve.errors import Overloaded
from pdserve.frontend.body import Asks, Refusal
from pdserve.frontend.limits import too_late
from pdserve.frontend.pace import Pace
from pdserve.processor.room import Room
from pdserve.processor.trace import Trace
from pdserve.processor.usual import Usual

_REMEMBERED = 1000
"""clients that are known beside those who wait"""


class Ticket:
    def __init__(self, client: str, asks: Asks, trace: Trace) -> None:
        self.client = client
        self.asks = asks
        self.trace = trace
        self.size = 1.0
        """tokens, about"""
        self.place = 0.0
        """in tokens; the lowest is next"""
        self.waited = False
        self._called = asyncio.Event()
        self._refusal: Overloaded | None = None

    @property
    def waiting(self) -> bool:
        return not self._called.is_set()

    async def turn(self) -> None:
        """Until it is this one's turn. Raises Overloaded where it never will be."""
        await self._called.wait()
        if self._refusal is not None:
            raise self._refusal

    def call(self, refusal: Overloaded | None = None) -> None:
        self._refusal = refusal
        self._called.set()


class Line:
    """Who joins or passes must leave. `room` is asked before each turn; whoever knows that there may be more
    calls `advance`."""

    def __init__(self, limits: Limits, room: Callable[[], Room], usual: Callable[[], Usual]) -> None:
        self.limits = limits
        """may be changed at any time"""
        self._room = room
        self._usual = usual
        self._pace = Pace()
        self._waiting: list[Ticket] = []
        self._tokens = 0.0
        self._inside: set[Ticket] = set()
        """called, and not gone"""
        self._entering: set[Ticket] = set()
        """called, and no decode worker has it yet: the room does not know of these"""
        self._served = 0.0
        """the place of the last one called"""
        self._ends: dict[str, float] = {}
        """by client: the place of its last one"""
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, client: str, asks: Asks, trace: Trace) -> Ticket:
        """Raises Overloaded, and Refusal for what is too much even where nobody else is."""
        if asks.sequences > self.limits.max_waiting:
            raise Refusal(400, f"n and prompts make {asks.sequences} outputs: too many for one request", "n")
        self._check_inside()
        ticket = Ticket(client, asks, trace)
        self._queue(ticket)
        self.advance()
        if ticket.waiting:
            ticket.waited = True
            self._check_time(ticket)
            self._check_bounds(ticket)
        return ticket

    def pass_by(self, trace: Trace) -> Ticket:
        """For what needs no decode worker. Raises Overloaded."""
        self._check_inside()
        ticket = Ticket("", Asks(0, None), trace)
        self._inside.add(ticket)
        ticket.call()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        if ticket.waiting:
            self._withdraw(ticket)
        self._inside.discard(ticket)
        self._entering.discard(ticket)
        self._left.set()
        self.advance()

    async def empty(self) -> None:
        """Until nobody waits or is inside."""
        while self._waiting or self._inside:
            self._left.clear()
            await self._left.wait()

    def advance(self) -> None:
        """Call those for whom there is room."""
        if not self._waiting:
            return
        self._entering = {one for one in self._entering if not one.trace.prompt_tokens}
        room = self._room()
        while self._waiting and self._has_place(room):
            self._call(self._waiting[0])

    # inside

    def _queue(self, ticket: Ticket) -> None:
        asks, client = ticket.asks, ticket.client
        ticket.size = 1 + asks.prompt_tokens + asks.sequences * self._usual().output(asks.max_tokens)
        ticket.place = max(self._served, self._ends.get(client, 0.0)) + ticket.size
        self._ends[client] = ticket.place
        if len(self._ends) > _REMEMBERED + len(self._waiting):
            wait = {one.client for one in self._waiting}  # their places move when an earlier one leaves
            self._ends = {c: end for c, end in self._ends.items() if end > self._served or c in wait}
        insort(self._waiting, ticket, key=_place)
        self._count(ticket.size)

    def _withdraw(self, ticket: Ticket) -> None:
        """As if it had never come: its client's later ones move up."""
        self._waiting.remove(ticket)
        for other in self._waiting:
            if other.client == ticket.client and other.place > ticket.place:
                other.place -= ticket.size
        self._ends[ticket.client] -= ticket.size
        self._waiting.sort(key=_place)
        self._count(-ticket.size)

    def _call(self, ticket: Ticket) -> None:
        if (
            ticket.waited
            and clock.unix() + self._usual().seconds(ticket.asks.max_tokens) > ticket.trace.deadline
        ):
            self._refuse(ticket, "its turn has come too late for its deadline")
            return
        self._waiting.remove(ticket)
        if ticket.waited:
            self._pace.turn(ticket.size, time.monotonic())
        self._count(-ticket.size)
        self._served = max(self._served, ticket.place)
        self._inside.add(ticket)
        self._entering.add(ticket)
        ticket.call()

    def _refuse(self, ticket: Ticket, why: str) -> Overloaded:
        wait = self._pace.seconds(self._tokens, time.monotonic())
        refusal = Overloaded(why, wait or self._usual().seconds(None))
        self._withdraw(ticket)
        ticket.call(refusal)
        return refusal

    def _count(self, tokens: float) -> None:
        self._tokens += tokens
        if not self._waiting:  # all begin anew
            self._served = self._tokens = 0.0
            self._ends.clear()
        self._pace.waiting(bool(self._waiting), time.monotonic())

    def _has_place(self, room: Room) -> bool:
        requests = sum(one.asks.sequences for one in self._entering)
        return room.requests > requests and room.tokens > sum(one.size for one in self._entering)

    # what is too much

    def _check_inside(self) -> None:
        """Answers that are not read, and requests that need no worker, are bounded by nothing else."""
        if len(self._inside) >= self._room().places + self.limits.max_waiting:
            raise Overloaded(f"{len(self._inside)} requests are being answered")

    def _check_time(self, ticket: Ticket) -> None:
        places = self._room().places
        if not places:
            return  # nobody knows when a worker will come
        before = self._waiting[: self._waiting.index(ticket)]
        wait = self._pace.seconds(sum(one.size for one in before), time.monotonic())
        usual, left = self._usual(), ticket.trace.deadline - clock.unix()
        if wait is None:
            wait = len(before) / places * usual.seconds(None)
        late = too_late(wait, left, usual.seconds(ticket.asks.max_tokens), self.limits.max_wait)
        if late:
            self._withdraw(ticket)
            raise Overloaded("its turn would come too late: too many requests wait", late)

    def _check_bounds(self, ticket: Ticket) -> None:
        limits = self.limits
        while len(self._waiting) > limits.max_waiting or (
            self._tokens > limits.max_waiting_tokens and len(self._waiting) > 1
        ):
            last = self._waiting[-1]
            refusal = self._refuse(last, "as many requests wait as may")
            if last is ticket:
                raise refusal


def _place(ticket: Ticket) -> float:
    return ticket.place
