"""OpenTelemetry traces: the spans of this process's part of a request (docs/traces.md lists them all).

Like receipts, spans are made of the request's hops, most of them when it is over and with given times. A span with
children in other processes (a request, and each of its attempts at a decode worker) is begun when it begins, since the
children need its id, which `Submit` and `PrefillRequest` carry. Without a collector OpenTelemetry is not imported.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Self

from pdserve.messages import Hop
from pdserve.watch import DETOURS

Attributes = Mapping[str, str | int | float]
"""empty strings are left out"""
NONE: Attributes = {}


class TracedSpan(ABC):
    """A begun span. Times are monotonic seconds; a span and its children share one reading of the time of day."""

    trace_id: str
    traceparent: str
    """W3C trace context, for its children in other processes"""

    @abstractmethod
    def begin(self, name: str, start: float, attributes: Attributes = NONE) -> "TracedSpan":
        """Begin a child span."""

    @abstractmethod
    def event(self, name: str, at: float, attributes: Attributes = NONE) -> None: ...

    @abstractmethod
    def end(self, at: float, attributes: Attributes = NONE, error: str = "") -> None:
        """End it, once; `error` says why it failed."""

    def add_hops(self, hops: Iterable[Hop], zero: float) -> None:
        """Add hops as child spans, detours as events; `zero` is the time that their starts count from."""
        for hop in hops:
            start, said = zero + hop.start, {"pdserve.instance": hop.instance, "pdserve.why": hop.why}
            if hop.name in DETOURS:
                self.event(hop.name, start, said)
            else:
                self.begin(hop.name, start, said).end(start + hop.seconds)


class Tracer:
    """One process's; this class itself traces nothing. Entering it starts the thread that sends spans: do so after the
    process has forked."""

    on = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is left, within a second."""

    def request(
        self, name: str, started: float, headers: Mapping[str, Sequence[str]], attributes: Attributes
    ) -> TracedSpan | None:
        """Begin the span of an HTTP request. `headers` has all its values of `traceparent` and `tracestate`. None where
        the request is not sampled."""
        return None

    def part(
        self, name: str, started: float, traceparent: str, attributes: Attributes = NONE
    ) -> TracedSpan | None:
        """Begin a child of another process's span; None where `traceparent` names none."""
        return None


def make_tracer(endpoint: str | None, service: str, instance: str) -> Tracer:
    """`endpoint`: URL of the collector, for OTLP over HTTP."""
    if endpoint is None:
        return Tracer()
    tracer: Tracer = import_module("pdserve.observe.otlp").OtlpTracer(endpoint, service, instance)
    return tracer
