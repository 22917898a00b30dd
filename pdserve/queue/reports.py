"""Decides when a prefill worker broadcasts its queue state. Pure: callers pass the time.

The decode worker whose request was pulled gets the state with `PrefillStarted`. The prefill worker reports it to all
others `interval` seconds after the pull, if the queue or the worker's backlog or speed is then not what they expect
(docs/decisions/0126-reports-at-a-bounded-rate.md)."""

from msgspec.structs import replace

from pdserve.contract.messages import PrefillLoad, QueueState
from pdserve.util.lru import LruDict

INTERVAL = 0.1
"""Minimum of seconds from a pull to its report, and between two reports of a worker."""
MAX_RATE = 50.0
"""Approximate maximum of reports per second of all prefill workers together."""
BACKLOG_ERROR = 0.05
"""Seconds by which decode workers may be wrong about a prefill worker's backlog."""
SPEED_ERROR = 0.25
"""Share by which decode workers may be wrong about a prefill worker's seconds per token."""
ACTIVE = 5.0
"""Seconds for which a prefill worker is active after a report, and a decode worker after a pull of its prompt."""
MAX_WORKERS = 1000
"""Maximum of remembered workers of each role."""


def backlog(load: PrefillLoad, age: float) -> float:
    """Seconds of work that a worker has left, by its load of `age` seconds ago."""
    return max(0.0, load.tokens * load.token_seconds - age)


class StateReports:
    def __init__(self) -> None:
        self._queue, self._queue_at = QueueState(0, 0), 0.0
        """The newest reported state of the queue, and when it was reported."""
        self._last: LruDict[tuple[QueueState, float]] = LruDict(MAX_WORKERS)
        """By prefill worker: its last report, and when."""
        self._asking: LruDict[float] = LruDict(MAX_WORKERS)
        """By decode worker: when this prefill worker last pulled one of its prompts."""

    def reported(self, state: QueueState, now: float) -> None:
        """Record a broadcast of any prefill worker, this one included."""
        if state.delivered_seq >= self._queue.delivered_seq:
            self._queue, self._queue_at = state, now
        if state.worker:
            self._last[state.worker] = state, now

    def pulled(self, decode: str, now: float) -> None:
        """Record a pull of a prompt of this decode worker."""
        self._asking[decode] = now

    def interval(self, now: float) -> float:
        """Seconds between two reports of a worker."""
        active = sum(at > now - ACTIVE for _, at in self._last.values())
        return max(INTERVAL, active / MAX_RATE)

    def next(self, state: QueueState, now: float) -> QueueState | None:
        """Return the report of this worker's `state` after a pull; None if decode workers do not need it.

        Until the next report, a decode worker does not hear of prompts that the worker pulls for others. So half an
        interval of work is added to the load, times the share of the other decode workers."""
        load, asking = state.load, sum(at > now - ACTIVE for at in self._asking.values())
        if load.tokens and load.token_seconds and asking > 1:
            more = self.interval(now) / 2 * (1 - 1 / asking)
            state = replace(state, load=replace(load, tokens=load.tokens + int(more / load.token_seconds)))
        return state if self._queue_moved(state, now) or self._load_changed(state, now) else None

    def _queue_moved(self, state: QueueState, now: float) -> bool:
        """Whether the last report of the queue is at least `INTERVAL` seconds old, a prompt was pulled since, and
        prompts wait now or did then."""
        moved = state.delivered_seq > self._queue.delivered_seq and (state.pending or self._queue.pending)
        return bool(moved) and now - self._queue_at >= INTERVAL

    def _load_changed(self, state: QueueState, now: float) -> bool:
        last, at = self._last.get(state.worker, (QueueState(0, 0), 0.0))
        if abs(backlog(state.load, 0.0) - backlog(last.load, now - at)) > BACKLOG_ERROR:
            return True
        return abs(state.load.token_seconds - last.load.token_seconds) > SPEED_ERROR * last.load.token_seconds
