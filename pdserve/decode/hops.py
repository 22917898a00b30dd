"""Records the hops of one request at its decode worker (`contract/reports.py`: `HOPS`), from what this worker sees and
from the durations in the prefill workers' messages."""

from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.contract.messages import Hop
from pdserve.contract.reports import MIN_HOP_SECONDS


@dataclass(eq=False)
class RequestHops:
    """Times are monotonic seconds of this process."""

    arrived: float
    known: list[Hop] = field(default_factory=list)
    """Hops so far, in the order of their starts."""
    _asked: float = 0.0
    """When a remote prefill was asked for."""
    _published: float = 0.0
    """When the prompt was published; before that, when a remote prefill was asked for."""
    _why: str = ""
    """Reason of the remote prefill."""
    _pulls: list[tuple[str, float]] = field(default_factory=list)
    """Prefill workers that pulled the prompt, each with the prompt's seconds in the queue until then."""

    @property
    def own(self) -> list[Hop]:
        """Hops that this worker traces. Prefill workers trace those in their engines."""
        remote = {worker for worker, _ in self._pulls}
        return [
            hop
            for hop in self.known
            if hop.name not in ("engine-queue", "prefill") or hop.instance not in remote
        ]

    def add(self, name: str, start: float, end: float, instance: str = "", why: str = "") -> None:
        self.known.append(Hop(name, start - self.arrived, max(0.0, end - start), instance, why))

    def asked(self, now: float, why: str) -> None:
        self._asked, self._published, self._why = now, now, why

    def missed(self, why: str) -> None:
        """Record why the worker with the prefix did not begin the prompt."""
        self._why = f"{self._why}; {why}"

    @property
    def held(self) -> float:
        """Seconds that the prompt was held back before it was published."""
        return self._published - self._asked

    def published(self, now: float) -> None:
        """Record that the prompt is published. The wait before this is part of the `queue` hop."""
        self._published = now

    def pulled(self, worker: str, queued: float) -> None:
        if not self._pulls or self._pulls[-1][0] != worker:
            self._pulls.append((worker, queued))

    def answered(
        self, worker: str, queued: float, computed: float, now: float, engine_queued: float = 0.0
    ) -> None:
        """Record the answer. If `queued` is unknown (0), all time but the computation counts as queue."""
        self.pulled(worker, queued or now - self._published - computed)
        self._add_remote(min(now, self._published + self._pulls[-1][1] + computed), engine_queued)

    def ended(self, now: float) -> None:
        """Record that the wait for a remote prefill ended without a usable answer."""
        self._add_remote(now)

    def _add_remote(self, end: float, engine_queued: float = 0.0) -> None:
        """Add the hops of a remote prefill. The time of messages is in no hop: it is a gap before the next hop."""
        marks = [min(end, self._published + max(0.0, queued)) for _, queued in self._pulls] + [end]
        self.add("queue", self._asked, marks[0], why=self._why)
        for (worker, _), (start, until) in zip(self._pulls[:-1], pairwise(marks[:-1]), strict=True):
            self.add("prefill", start, until, worker)
        if self._pulls:
            self.prefilled(marks[-2], marks[-2] + engine_queued, end, self._pulls[-1][0])

    def prefilled(self, since: float, begun: float | None, end: float, instance: str, why: str = "") -> None:
        """Record a prefill: the engine got the prompt at `since` and began it at `begun` (None: unknown)."""
        begun = min(end, max(since, begun or since))
        if begun - since >= MIN_HOP_SECONDS:
            self.add("engine-queue", since, begun, instance)
            since = begun
        self.add("prefill", since, end, instance, why)

    def read(self, since: float, begun: float | None, now: float, source: str, instance: str) -> float:
        """Record that the engine got the request at `since`, read its KV from `source`, began its first step at `begun`
        (None: unknown) and finished it now. Return the seconds that it waited for the KV."""
        started = min(max(since, begun if begun is not None else now), now)
        self.add("transfer", since, started, source)
        self.add("first-step", started, now, instance)
        return started - since
