"""Decides when a prefill worker broadcasts its queue state. Pure: callers pass the time.

The decode worker whose request was pulled gets the state with `PrefillStarted`. The other ones need it only where it
changes their decisions, so a report is sent `INTERVAL` after a pull, and only if the queue or the worker's backlog is
then not what they expect. What is done within that time is never reported, so that an unloaded graph sends no reports,
and a loaded one at most `MAX_RATE` a second. See docs/decisions/0126-reports-at-a-bounded-rate.md."""

from pdserve.contract.messages import PrefillLoad, QueueState
from pdserve.util.lru import LruDict

INTERVAL = 0.1
"""Seconds from a pull to its report, and between two reports of a worker, at least."""
MAX_RATE = 50.0
"""Reports a second of all prefill workers together, about."""
BACKLOG_ERROR = 0.05
"""Seconds of a worker's work by which the others may be wrong."""
SPEED_ERROR = 0.25
"""The same for its seconds per token, as a share."""
ACTIVE = 5.0
"""Seconds without a report after which a prefill worker does not count for `MAX_RATE`."""
MAX_WORKERS = 1000
"""Most prefill workers that are remembered."""


def backlog(load: PrefillLoad, age: float) -> float:
    """Seconds of work that a worker has left, by its load of `age` seconds ago."""
    return max(0.0, load.tokens * load.token_seconds - age)


class StateReports:
    def __init__(self) -> None:
        self._queue, self._queue_at = QueueState(0, 0), 0.0
        """The newest reported state of the queue, and when it was reported."""
        self._loads: LruDict[tuple[PrefillLoad, float]] = LruDict(MAX_WORKERS)
        """By prefill worker: the load and time of its last report."""

    def reported(self, state: QueueState, now: float) -> None:
        """Record a broadcast of any prefill worker, this one included."""
        if state.delivered_seq >= self._queue.delivered_seq:
            self._queue, self._queue_at = state, now
        if state.worker:
            self._loads[state.worker] = state.load, now

    def interval(self, now: float) -> float:
        """Seconds between two reports of a worker."""
        active = sum(at > now - ACTIVE for _, at in self._loads.values())
        return max(INTERVAL, active / MAX_RATE)

    def is_due(self, state: QueueState, now: float) -> bool:
        """Whether decode workers need `state`, which is this worker's own."""
        return self._queue_moved(state, now) or self._load_changed(state, now)

    def _queue_moved(self, state: QueueState, now: float) -> bool:
        """Whether prompts were waiting or are, unless another worker has just reported the queue."""
        moved = state.delivered_seq > self._queue.delivered_seq and (state.pending or self._queue.pending)
        return bool(moved) and now - self._queue_at >= INTERVAL

    def _load_changed(self, state: QueueState, now: float) -> bool:
        load, at = self._loads.get(state.worker, (PrefillLoad(), 0.0))
        if abs(backlog(state.load, 0.0) - backlog(load, now - at)) > BACKLOG_ERROR:
            return True
        return abs(state.load.token_seconds - load.token_seconds) > SPEED_ERROR * load.token_seconds
