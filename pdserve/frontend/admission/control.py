"""Who waits for a turn at a model: a fair line in front of the room that its decode workers have.

Each sequence that a request generates (n, several prompts) takes a turn. The first one lets the HTTP request in; the
engine core asks for the others when the prompt is tokenized, and they enter as places come free, like those of many
requests.

Turns go round the clients, in tokens (self-clocked fair queueing): each of a client's sequences has its place
as many tokens as it is large behind the one before, and the first one behind the place that is served now; the
lowest is next. So a client that sends one request goes before the second one of a client that sends a thousand.
Beside that a client gets no further place while it holds its share of them and others wait, since sequences may last
much longer than is usual; a client alone may hold every place.

A request that would be served too late is told at once, and where too many wait, the last one must go.
"""

import asyncio
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config.schema import AdmissionLimits
from pdserve.errors import Overloaded
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.estimate import RequestEstimate
from pdserve.frontend.admission.limits import too_late
from pdserve.frontend.admission.pace import AdmissionRate
from pdserve.frontend.body import Asks, Refusal

GROUP = 8
"""outputs of a request that stand in line together; with more it goes behind the others of its client again"""
_REMEMBERED = 1000
"""clients that are known beside those that wait or hold places"""


@dataclass
class ClientShare:
    """A client."""

    end: float = 0.0
    """the place of its last sequence"""
    waiting: int = 0
    """its tickets in the line"""
    held: int = 0
    """places at the workers: sequences whose turn has come and that are not over"""


class ModelReplaced(Exception):
    """The model is another one now: the request has to stand in that one's line."""


class Admission:
    """An HTTP request, from its coming to its end."""

    def __init__(self, line: "AdmissionControl", client: str, asks: Asks, deadline: float) -> None:
        self.client = client
        self.asks = asks
        self.deadline = deadline
        """monotonic seconds"""
        self.left = min(GROUP, asks.sequences)
        """its next sequences, which have their place in the line"""
        self.size = 1.0
        """tokens of each of them, about"""
        self.place = 0.0
        """of the next one, in tokens; the lowest is next"""
        self.waited = False
        self.unused = False
        """the turn that let the request in, until its first sequence begins"""
        self.asked: deque[SequencePermit] = deque()
        """turns that the engine core waits for"""
        self._line = line
        self._called = asyncio.Event()
        self._refusal: Exception | None = None

    @property
    def waiting(self) -> bool:
        return not self._called.is_set()

    async def turn(self) -> None:
        """Until the request may go on to the model. Raises Overloaded where it never may, and ModelReplaced."""
        await self._called.wait()
        if self._refusal is not None:
            raise self._refusal

    def call(self, refusal: Exception | None = None) -> None:
        self._refusal = refusal
        self._called.set()

    def permit(self, begin: Callable[[], None], drop: Callable[[], None]) -> "SequencePermit":
        """For one sequence; `begin` is called when its turn has come, or `drop` when the request ended before."""
        return SequencePermit(self._line, self, begin, drop)


class SequencePermit:
    """Of one sequence. It must be ended."""

    def __init__(
        self, line: "AdmissionControl", ticket: Admission, begin: Callable[[], None], drop: Callable[[], None]
    ) -> None:
        self.ticket = ticket
        self.begin = begin
        self.drop = drop
        self.granted = False
        """the sequence has its place"""
        self.requested = False
        self._line = line

    def request(self) -> None:
        """May begin it at once."""
        self.requested = True
        self._line.ask(self)

    def release(self) -> None:
        """The sequence is over or paused, begun or not. May be called twice; may be requested again."""
        self.requested = False
        self._line.end(self)


class AdmissionControl:
    """A ticket that joins or passes must leave. `room` is asked before each turn; call `advance` whenever there may
    be more."""

    def __init__(
        self, limits: AdmissionLimits, room: Callable[[], Capacity], usual: Callable[[], RequestEstimate]
    ) -> None:
        self.limits = limits
        """may be changed at any time"""
        self._room = room
        self._usual = usual
        self._pace = AdmissionRate()
        self._waiting: list[Admission] = []
        """in order of place"""
        self._tokens = 0.0
        """that they wait for"""
        self._inside: set[Admission] = set()
        """called, and not gone"""
        self._entering: set[Admission] = set()
        """of these, what no decode worker has yet: the room does not know of it"""
        self._served = 0.0
        """the place of the last turn"""
        self._accounts: dict[str, ClientShare] = {}
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> int:
        """That wait for their first turn or are inside, without those that pass by."""
        return sum(one.waiting for one in self._waiting) + sum(bool(one.client) for one in self._inside)

    def join(self, client: str, asks: Asks, deadline: float) -> Admission:
        """Raises Overloaded, and Refusal for what is too much even where nobody else is."""
        if asks.sequences > self.limits.max_outputs:
            text = (
                f"n and prompts make {asks.sequences} outputs; one request may have {self.limits.max_outputs}"
            )
            raise Refusal(400, text, "n" if asks.n > 1 else "prompt")
        self._check_inside()
        ticket = Admission(self, client, asks, deadline)
        ticket.size = (1 + asks.prompt_tokens) / asks.sequences + self._usual().tokens(asks.max_tokens)
        self._reserve(ticket)
        self._put(ticket)
        self.advance()
        if ticket.waiting:
            ticket.waited = True
            self._check_time(ticket)
            self._check_bounds(ticket)
        return ticket

    def pass_by(self) -> Admission:
        """For what needs no decode worker. Raises Overloaded."""
        self._check_inside()
        ticket = Admission(self, "", Asks(0, None), math.inf)
        ticket.left = 0
        self._inside.add(ticket)
        ticket.call()
        return ticket

    def leave(self, ticket: Admission) -> None:
        self._withdraw(ticket)
        if ticket.unused:
            ticket.unused = False
            self._account(ticket.client).held -= 1
        self._inside.discard(ticket)
        self._entering.discard(ticket)
        for turn in list(ticket.asked):
            turn.drop()
        self._left.set()
        self.advance()

    def others_wait(self, ticket: Admission) -> bool:
        return any(one.client != ticket.client for one in self._waiting)

    def dissolve(self) -> None:
        """All who wait for their first turn have to stand in another line, in the order of this one."""
        for ticket in [one for one in self._waiting if one.waiting]:
            self._withdraw(ticket)
            ticket.call(ModelReplaced())

    async def empty(self) -> None:
        """Until nobody waits or is inside."""
        while self._waiting or self._inside:
            self._left.clear()
            await self._left.wait()

    def advance(self) -> None:
        """Call those for whom there is room."""
        while self._waiting:
            room = self._room()
            if not self._has_place(room):
                return
            self._call(self._next(room.max_requests))

    # the sequences of a request

    def ask(self, turn: SequencePermit) -> None:
        ticket = turn.ticket
        if ticket.unused:
            ticket.unused = False
            self._entering.discard(ticket)
            turn.granted = True
            turn.begin()
            return
        ticket.asked.append(turn)
        if len(ticket.asked) == 1:
            ticket.waited = False
            self._put(ticket)
        self.advance()
        ticket.waited = bool(ticket.asked)

    def end(self, turn: SequencePermit) -> None:
        ticket = turn.ticket
        if turn.granted:
            turn.granted = False
            self._account(ticket.client).held -= 1
        elif turn in ticket.asked:
            ticket.asked.remove(turn)
            if not ticket.asked:
                self._take_out(ticket)

    # inside

    def _account(self, client: str) -> ClientShare:
        return self._accounts.setdefault(client, ClientShare())

    def _reserve(self, ticket: Admission) -> None:
        """The places of its next sequences, behind those of its client."""
        account = self._account(ticket.client)
        start = max(self._served, account.end)
        ticket.place = start + ticket.size
        account.end = start + ticket.size * ticket.left
        if len(self._accounts) > _REMEMBERED + len(self._waiting) + len(self._inside):
            self._accounts = {
                client: one
                for client, one in self._accounts.items()
                if one.end > self._served or one.waiting or one.held
            }

    def _put(self, ticket: Admission) -> None:
        if not ticket.left:
            ticket.left = min(GROUP, len(ticket.asked))
            self._reserve(ticket)
        insort(self._waiting, ticket, key=_place)
        self._account(ticket.client).waiting += 1
        self._count(ticket.size * ticket.left)

    def _take_out(self, ticket: Admission) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._account(ticket.client).waiting -= 1
            self._count(-ticket.size * ticket.left)

    def _withdraw(self, ticket: Admission) -> None:
        """As if what is left of it had never come: its client's later ones move up."""
        self._take_out(ticket)
        tokens, ticket.left = ticket.size * ticket.left, 0
        if not tokens:
            return
        for other in self._waiting:
            if other.client == ticket.client and other.place > ticket.place:
                other.place -= tokens
        self._account(ticket.client).end -= tokens
        self._waiting.sort(key=_place)

    def _next(self, places: int) -> Admission:
        """The first one of a client that has less than its share of the places; where each has its share, the first
        one."""
        clients = sum(bool(one.held or one.waiting) for one in self._accounts.values())
        share = max(1, places // clients)
        within = (one for one in self._waiting if self._accounts[one.client].held < share)
        return next(within, self._waiting[0])

    def _call(self, ticket: Admission) -> None:
        end = time.monotonic() + self._usual().seconds(ticket.asks.max_tokens)
        if ticket.waiting and ticket.waited and end > ticket.deadline:
            self._refuse(ticket, "its turn has come too late for its deadline")
            return
        self._take_out(ticket)
        if ticket.waited:
            self._pace.turn(ticket.size, time.monotonic())
        self._served = max(self._served, ticket.place)
        self._account(ticket.client).held += 1
        ticket.left -= 1
        ticket.place += ticket.size
        if ticket.waiting:
            ticket.unused = True
            self._inside.add(ticket)
            self._entering.add(ticket)
            ticket.call()
            return
        turn = ticket.asked.popleft()
        if ticket.asked:
            self._put(ticket)
        turn.granted = True
        turn.begin()

    def _refuse(self, ticket: Admission, why: str) -> Overloaded:
        wait = self._pace.seconds(self._tokens, time.monotonic())
        refusal = Overloaded(why, wait or self._usual().seconds(None))
        self._withdraw(ticket)
        ticket.call(refusal)
        return refusal

    def _count(self, tokens: float) -> None:
        self._tokens = self._tokens + tokens if self._waiting else 0.0
        self._pace.waiting(bool(self._waiting), time.monotonic())

    def _has_place(self, room: Capacity) -> bool:
        return room.free_requests > len(self._entering) and room.free_tokens > sum(
            one.size for one in self._entering
        )

    # what is too much

    def _check_inside(self) -> None:
        """Answers that are not read, and requests that need no worker, are bounded by nothing else."""
        if len(self._inside) >= self._room().max_requests + self.limits.max_waiting:
            raise Overloaded(f"{len(self._inside)} requests are being answered")

    def _check_time(self, ticket: Admission) -> None:
        places = self._room().max_requests
        if not places:
            return  # nobody knows when a worker will come
        before = [(one, _turns_before(one, ticket)) for one in self._waiting if one.place < ticket.place]
        wait = self._pace.seconds(sum(one.size * turns for one, turns in before), time.monotonic())
        usual, left = self._usual(), ticket.deadline - time.monotonic()
        if wait is None:
            wait = sum(turns for _, turns in before) / places * usual.seconds(None)
        late = too_late(wait, left, usual.seconds(ticket.asks.max_tokens), self.limits.max_wait)
        if late:
            self._withdraw(ticket)
            raise Overloaded("its turn would come too late: too many requests wait", late)

    def _check_bounds(self, ticket: Admission) -> None:
        limits = self.limits
        outside = [one for one in self._waiting if one.waiting]
        while len(outside) > limits.max_waiting or (
            self._tokens > limits.max_waiting_tokens and len(outside) > 1
        ):
            last = outside.pop()
            refusal = self._refuse(last, "as many requests wait as may")
            if last is ticket:
                raise refusal


def _place(ticket: Admission) -> float:
    return ticket.place


def _turns_before(ticket: Admission, other: Admission) -> int:
    """Of its sequences, those whose turns come before the other one's."""
    return min(ticket.left, 1 + int((other.place - ticket.place) // ticket.size))
