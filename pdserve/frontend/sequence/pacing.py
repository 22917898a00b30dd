"""Holds back outputs of streams that are generated faster than the promised gap, to bridge the stalls to come: a step
with a prompt's chunk in it, a KV read, a migration (docs/slo.md).

A stream has a reserve of a few outputs. While its outputs come, one leaves for each that comes, a little later. When
none comes, they leave one by one, each within the promised gap of the one before. With its last output all leave
together, so that no answer ends later. An answer that is no faster than its promise has no reserve, and waits for
nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.contract.slo import SloTargets
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.vllm.api_server import EngineCoreOutput, EngineCoreRequest, RequestOutputKind

T = TypeVar("T")
S = TypeVar("S")

PACE_SHARE = 2 / 3
"""of the promised gap, after which an output follows from the reserve. The rest is for the way to the client, and for
whatever else this process and the client do then"""
MAX_HELD = 16
"""outputs in a reserve. At a gap of 60 ms they bridge 16 x 40 + 20 ms, which is about what a migration takes, and they
are all that leaves at once when an answer ends"""
MAX_HOLD = 0.25
"""seconds that an output is held while others come after it: little for a reader, and enough for those `MAX_HELD` at 64
tokens per second"""
TTFT_MARGIN = 0.1
"""seconds before the promised TTFT at which the first output leaves, also without a second; a fifth of shorter ones"""
DEADLINE_MARGIN = 1.0
"""seconds before a request's deadline from which on nothing is held"""
MAX_EARLY = 0.005
"""seconds by which an output may leave early, so that those of many streams leave in one turn of the event loop"""


@dataclass(slots=True)
class Reserve(Generic[T]):
    """The outputs of one stream that are held back, in their order. All times are monotonic seconds."""

    pace: float
    """seconds from one output to the next, when none comes"""
    first_due: float
    """when the first output leaves, also without a second; infinite: `MAX_HOLD` after it came"""
    until: float
    """from then on nothing is held"""
    _held: deque[tuple[float, T]] = field(default_factory=deque)
    """with the time of arrival"""
    _left: float = 0.0
    """when the last output left; 0 before"""

    @classmethod
    def of(cls, promised: SloTargets, arrived: float, deadline: float) -> "Reserve[T] | None":
        """Return the reserve for a request that arrived then; None without a promised gap, for which to hold any."""
        if promised.gap is None:
            return None
        ttft = math.inf if promised.ttft is None else promised.ttft - min(TTFT_MARGIN, promised.ttft / 5)
        return cls(promised.gap * PACE_SHARE, arrived + ttft, deadline - DEADLINE_MARGIN)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def due(self) -> float:
        """When an output has to leave, if none comes before; infinite if none is held."""
        if not self._held:
            return math.inf
        return min(self._left + self.pace if self._left else self.first_due, self.until)

    def add(self, output: T, now: float) -> list[T]:
        """Take an output that has come; return what leaves now."""
        held, leaves = self._held, list[T]()
        held.append((now, output))
        if not self._left:
            self.first_due = (
                min(self.first_due, now + MAX_HOLD) if self.first_due == math.inf else self.first_due
            )
            if len(held) < 2 and self.due > now:
                return leaves  # else the second is here, which can follow the first in time
            leaves.append(self._pop(now))
        while held and (
            now >= self._left + self.pace
            or now - held[0][0] >= MAX_HOLD
            or len(held) > MAX_HELD
            or now >= self.until
        ):
            leaves.append(self._pop(now))
        return leaves

    def pop_due(self, now: float) -> list[T]:
        """Return what leaves although nothing has come, up to `MAX_EARLY` early."""
        leaves = []
        while self.due <= now + MAX_EARLY:
            leaves.append(self._pop(now))
        return leaves

    def flush(self) -> list[T]:
        """Return all that is held: nothing comes any more."""
        leaves = [output for _, output in self._held]
        self._held.clear()
        return leaves

    def _pop(self, now: float) -> T:
        self._left = now
        return self._held.popleft()[1]


def reserve_for(request: EngineCoreRequest, state: RequestState) -> Reserve[EngineCoreOutput] | None:
    """Return the reserve of a request that may have one: a stream of one sequence with a promised gap. A stop string
    would be found later, when an output goes on, and a parser of calls might read several tokens at once
    differently."""
    params = request.sampling_params
    streams = params.output_kind is RequestOutputKind.DELTA and not params.stop and not state.has_tools
    if not streams or state.admission is None or state.admission.size.sequences != 1:
        return None
    return Reserve.of(state.promised, state.started, state.deadline)


class Pacer(Generic[S, T]):
    """The streams that have outputs in reserve; one timer for all of them."""

    def __init__(self, leave: Callable[[list[tuple[S, T]]], None]) -> None:
        """`leave` gets the outputs that leave although nothing has come."""
        self._leave = leave
        self._streams: dict[S, Reserve[T]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake = math.inf
        """when the timer is due"""

    def add(self, stream: S, reserve: Reserve[T] | None, output: T, *, last: bool) -> list[T]:
        """Take an output that has come; return what leaves now."""
        if reserve is None:
            return [output]
        if last:
            return [*self.drop(stream), output]
        leaves = reserve.add(output, time.monotonic())
        if len(reserve):
            self._streams[stream] = reserve
            self._wake_by(reserve.due)
        else:
            self._streams.pop(stream, None)
        return leaves

    def flush(self, stream: S) -> None:
        """Let all leave that the stream holds."""
        if held := self.drop(stream):
            self._leave([(stream, output) for output in held])

    def drop(self, stream: S) -> list[T]:
        """Forget the stream; return what it held."""
        reserve = self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer, self._wake = None, math.inf
        return reserve.flush() if reserve is not None else []

    def _wake_by(self, due: float) -> None:
        if due >= self._wake - MAX_EARLY:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake, loop = due, asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - time.monotonic()), self._turn)

    def _turn(self) -> None:
        self._timer, self._wake = None, math.inf
        now, leaves, wake = time.monotonic(), list[tuple[S, T]](), math.inf
        for stream, reserve in list(self._streams.items()):
            leaves += [(stream, output) for output in reserve.pop_due(now)]
            wake = min(wake, reserve.due)
            if not len(reserve):
                del self._streams[stream]
        self._wake_by(wake)
        if leaves:
            self._leave(leaves)
