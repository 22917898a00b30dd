"""Output pacing: hold back outputs of streams that are faster than their promised gap, to bridge later delays: an
engine step with a prompt's chunk, a KV read, a migration (docs/slo.md).

A stream has a reserve of a few outputs. Once it is full (`MAX_HELD`, `MAX_HOLD`), each new output releases an earlier
one. When none arrives, the held outputs leave one by one, each within the promised gap of the one before. The last
output releases all, so that no response ends later.
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
"""Share of the promised gap after which the next held output leaves. The rest is for delays in this process and on the
way to the client."""
MAX_HELD = 16
"""Maximum of outputs in a reserve. At a promised gap of 60 ms they last for 640 ms, about as long as a migration."""
MAX_HOLD = 0.25
"""Maximum of seconds that an output is held while others arrive. A reader hardly notices so short a delay."""
TTFT_MARGIN = 0.1
"""Seconds before the promised TTFT at which the first output leaves even without a second one: at most a fifth of the
TTFT."""
DEADLINE_MARGIN = 1.0
"""Seconds before a request's deadline from which on nothing is held."""
MAX_EARLY = 0.005
"""Seconds by which an output may leave early, so that outputs of many streams leave in one event loop turn."""


@dataclass(slots=True)
class Reserve(Generic[T]):
    """The held outputs of one stream, in order. All times are monotonic seconds."""

    pace: float
    """seconds between two outputs while none arrives"""
    first_due: float
    """when the first output leaves even without a second one; infinite: `MAX_HOLD` after it arrived"""
    until: float
    """when holding ends"""
    _held: deque[tuple[float, T]] = field(default_factory=deque)
    """(time of arrival, output)"""
    _left: float = 0.0
    """when the last output left; 0: none has"""

    @classmethod
    def of(cls, promised: SloTargets, arrived: float, deadline: float) -> "Reserve[T] | None":
        """Make the reserve of a request that arrived at this time; None without a promised gap."""
        if promised.gap is None:
            return None
        ttft = math.inf if promised.ttft is None else promised.ttft - min(TTFT_MARGIN, promised.ttft / 5)
        return cls(promised.gap * PACE_SHARE, arrived + ttft, deadline - DEADLINE_MARGIN)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def due(self) -> float:
        """When the next output has to leave if none arrives before; infinite if none is held."""
        if not self._held:
            return math.inf
        return min(self._left + self.pace if self._left else self.first_due, self.until)

    def add(self, output: T, now: float) -> list[T]:
        """Add an output that has arrived; return the outputs that leave now."""
        held, leaves = self._held, list[T]()
        held.append((now, output))
        if not self._left:
            if self.first_due == math.inf:
                self.first_due = now + MAX_HOLD
            if len(held) < 2 and self.due > now:
                return leaves  # the first output waits for the second one, which can then follow in time
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
        """Return the outputs that are due, up to `MAX_EARLY` early."""
        leaves = []
        while self.due <= now + MAX_EARLY:
            leaves.append(self._pop(now))
        return leaves

    def flush(self) -> list[T]:
        """Return all held outputs, because no more will arrive."""
        leaves = [output for _, output in self._held]
        self._held.clear()
        return leaves

    def _pop(self, now: float) -> T:
        self._left = now
        return self._held.popleft()[1]


def reserve_for(request: EngineCoreRequest, state: RequestState) -> Reserve[EngineCoreOutput] | None:
    """Make the reserve of a stream of one sequence with a promised gap. None with stop strings, which would be found
    late, and with tools, whose parser might read several tokens at once differently."""
    params = request.sampling_params
    streams = params.output_kind is RequestOutputKind.DELTA and not params.stop and not state.has_tools
    if not streams or state.admission is None or state.admission.size.sequences != 1:
        return None
    return Reserve.of(state.promised, state.started, state.deadline)


class Pacer(Generic[S, T]):
    """Releases held outputs of all streams, with one timer."""

    def __init__(self, leave: Callable[[list[tuple[S, T]]], None]) -> None:
        """`leave` is called with the outputs that are due."""
        self._leave = leave
        self._streams: dict[S, Reserve[T]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake = math.inf
        """when the timer fires"""

    def add(self, stream: S, reserve: Reserve[T] | None, output: T, *, last: bool) -> list[T]:
        """Add an output that has arrived; return the outputs that leave now."""
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
        """Release all held outputs of the stream."""
        if held := self.drop(stream):
            self._leave([(stream, output) for output in held])

    def drop(self, stream: S) -> list[T]:
        """Forget the stream; return its held outputs."""
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
