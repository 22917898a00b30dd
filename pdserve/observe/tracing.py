"""OpenTelemetry traces: what a process tells of its part of a request ([docs/traces.md] has every span).

Spans are made of what receipts are made of, the hops of a request, and mostly when it is over: their times are told.
What has parts in other processes (a request, and each of its attempts at a decode worker) is begun when it begins,
since those parts name its id; `Submit` and `PrefillRequest` carry it. Without a collector nothing of OpenTelemetry is
imported.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Self

from pdserve.messages import Hop
from pdserve.watch import DETOURS

Attributes = Mapping[str, str | int | float]
"""empty texts are left out"""
NONE: Attributes = {}


class TracedSpan(ABC):
    """A span that has begun. All times are monotonic seconds; whole trees are told by one reading of the clock."""

    trace_id: str
    traceparent: str
    """W3C trace context, for parts of it in other processes"""

    @abstractmethod
    def begin(self, name: str, start: float, attributes: Attributes = NONE) -> "TracedSpan":
        """A part of it."""

    @abstractmethod
    def event(self, name: str, at: float, attributes: Attributes = NONE) -> None: ...

    @abstractmethod
    def end(self, at: float, attributes: Attributes = NONE, error: str = "") -> None:
        """Once; `error` is why it failed."""

    def add_hops(self, hops: Iterable[Hop], zero: float) -> None:
        """As its parts, or as events where they take no time themselves; `zero` is what their starts count from."""
        for hop in hops:
            start, said = zero + hop.start, {"pdserve.instance": hop.instance, "pdserve.why": hop.why}
            if hop.name in DETOURS:
                self.event(hop.name, start, said)
            else:
                self.begin(hop.name, start, said).end(start + hop.seconds)


class Tracer:
    """Of one process; this class itself traces nothing. To enter it begins to send what is traced, in a thread: not
    before the process has its forks."""

    on = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is left, within a second."""

    def request(
        self, name: str, started: float, headers: Mapping[str, Sequence[str]], attributes: Attributes
    ) -> TracedSpan | None:
        """The span of an HTTP request, whose `traceparent` and `tracestate` are in `headers`, each as often as it came;
        None where it is not sampled."""
        return None

    def part(
        self, name: str, started: float, traceparent: str, attributes: Attributes = NONE
    ) -> TracedSpan | None:
        """A span below that of another process; None where `traceparent` names none."""
        return None


def make_tracer(endpoint: str | None, service: str, instance: str) -> Tracer:
    """`endpoint`: URL that spans are sent to, by OTLP/HTTP."""
    if endpoint is None:
        return Tracer()
    tracer: Tracer = import_module("pdserve.observe.otlp").OtlpTracer(endpoint, service, instance)
    return tracer
