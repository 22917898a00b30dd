"""A request in admission control, the permits of its sequences, and the order in which granted sequences are
preempted."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2s
from typing import Protocol

from pdserve.contract.slo import FLEX_PREFIX
from pdserve.frontend.admission.fair_queue import FairQueue, QueueEntry
from pdserve.frontend.admission.wait_estimate import RequestSize

KEPT = 4
"""One in this many slots is kept free of sequences that cannot pause."""


class Control(Protocol):
    """The part of `AdmissionControl` that an `Admission` refers to."""

    def request(self, permit: "SequencePermit") -> None: ...

    def release(self, permit: "SequencePermit") -> None: ...

    def yield_slots(self, count: int, there: "Mapping[SequencePermit, bool]") -> None: ...

    def advance(self) -> None: ...


class ModelReplaced(Exception):
    """Another model now has this model's name: the request must wait for the new model's workers."""


@dataclass(eq=False, kw_only=True)
class Admission(QueueEntry):
    """One HTTP request, from its arrival to its end."""

    control: Control
    queue: "FairQueue[Admission]"
    """in which it waits"""
    size: RequestSize
    deadline: float
    """monotonic seconds"""
    is_flex: bool = False
    queued: bool = False
    """its next permit was not granted at once; always false for flex"""
    unused: bool = False
    """it is admitted, but no sequence has taken its first permit yet"""
    requested: deque["SequencePermit"] = field(default_factory=deque)
    """permits that the engine core waits for"""
    unread: bool = False
    """its client has stopped reading the response"""
    paused: list["SequencePermit"] = field(default_factory=list)
    """permits preempted until the client reads again"""
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _refusal: Exception | None = None

    @property
    def client_hash(self) -> str:
        """The client's name at workers: a hash, because they need not know the key's name or the address."""
        name = blake2s(self.client.encode(), digest_size=6).hexdigest()
        return FLEX_PREFIX + name if self.is_flex else name

    @property
    def runs(self) -> int:
        """Number of its client's running sequences: of flex ones if it is flex, else of the others."""
        return self.queue.runs(self)

    @property
    def waiting(self) -> bool:
        """Whether it is neither admitted nor refused."""
        return not self._decided.is_set()

    async def wait(self) -> None:
        """Wait until the request may go on to the model. Raises Overloaded if it is refused, and ModelReplaced."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def decide(self, refusal: Exception | None = None) -> None:
        self._refusal = refusal
        self._decided.set()

    def permit(
        self,
        begin: Callable[[], None],
        drop: Callable[[], None],
        pause: Callable[[], bool],
        *,
        can_pause: bool = True,
    ) -> "SequencePermit":
        return SequencePermit(self, begin, drop, pause, can_pause)

    def set_unread(self, unread: bool) -> None:
        """Set whether the client has stopped reading. When it reads again, request its paused permits."""
        if unread != self.unread:
            self.unread = unread
            while self.paused and not unread:
                self.paused.pop().request()
            self.control.advance()


@dataclass(eq=False)
class SequencePermit:
    """Permission to run one sequence at a decode worker. It must be released."""

    admission: Admission
    begin: Callable[[], None]
    """called when the permit is granted, also after a pause"""
    drop: Callable[[], None]
    """called if the request ends before a grant"""
    pause: Callable[[], bool]
    """preempts the sequence; returns False if that is impossible now or frees no slot"""
    can_pause: bool = True
    granted: bool = False

    def request(self) -> None:
        """Queue for the permit. May call `begin` at once."""
        self.admission.control.request(self)

    def release(self) -> None:
        """Give the permit back: the sequence is over, begun or not. May be called twice."""
        self.admission.control.release(self)


class GrantedPermits:
    def __init__(self) -> None:
        self._permits: dict[SequencePermit, None] = {}
        """the youngest last"""
        self._fixed = Counter[bool]()
        """Number of permits that cannot pause, by `is_flex`."""

    def __len__(self) -> int:
        return len(self._permits)

    def __iter__(self) -> Iterator[SequencePermit]:
        return iter(self._permits)

    def add(self, permit: SequencePermit) -> None:
        permit.granted = True
        self._permits[permit] = None
        self._fixed[permit.admission.is_flex] += not permit.can_pause

    def remove(self, permit: SequencePermit) -> None:
        permit.granted = False
        del self._permits[permit]
        self._fixed[permit.admission.is_flex] -= not permit.can_pause

    @property
    def any_yielding(self) -> bool:
        """Whether any sequence is flex or unread: such a sequence may pause even if no client is short (`is_short`)."""
        return any(permit.admission.unread or permit.admission.is_flex for permit in self._permits)

    def leaves_room(self, places: int, *, is_flex: bool) -> bool:
        """Whether one more sequence that cannot pause leaves one slot in `KEPT` to sequences that can. A flex one must
        leave those slots empty, so that other requests find slots at once."""
        kept = max(places > 1, places // KEPT)
        if is_flex:
            return len(self) < places - kept and self._fixed[True] < max(kept, 1)
        return self._fixed.total() < places - kept

    def to_pause(self, permits: Iterable[SequencePermit]) -> list[SequencePermit]:
        """Of these permits, those that may be preempted, in order: unread ones, flex ones, then those of clients that
        run the most sequences, the youngest first. A client's only sequence is left out unless it is unread or flex."""
        age = {permit: age for age, permit in enumerate(self._permits)}

        def rank(permit: SequencePermit) -> tuple[bool, bool, int, int]:
            admission = permit.admission
            return admission.unread, admission.is_flex, admission.runs, age[permit]

        can = (permit for permit in permits if permit in age and permit.can_pause)
        return sorted(
            (permit for permit in can if rank(permit)[:3] > (False, False, 1)), key=rank, reverse=True
        )
