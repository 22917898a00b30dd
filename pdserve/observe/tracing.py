"""OpenTelemetry traces: the spans of this process's part of a request (docs/traces.md lists all spans).

Most spans are made from hops after the request's end. A span with children in other processes is made at its start,
because messages carry its id. A request that is not traced or not sampled has no span (None). This module imports only
OpenTelemetry's API; `otlp.py` imports the SDK, if there is a collector."""

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.contract.messages import Hop
from pdserve.contract.reports import DETOURS
from pdserve.util import clock

Attributes = Mapping[str, str | int | float]
"""Attributes of a span; empty strings are left out."""

MAX_ERROR = 300
"""Maximum of characters of an error in a span."""
_NONE: Attributes = {}
_KINDS = {"POST": SpanKind.SERVER, "attempt": SpanKind.CLIENT, "generate": SpanKind.SERVER}
"""By the first word of a span's name; other spans are internal."""
_PROPAGATOR = TraceContextTextMapPropagator()


class TracedSpan:
    """A started span. Times are monotonic seconds; a span and its children use one offset to the time of day."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, ahead: float) -> None:
        """`ahead`: seconds from monotonic time to the time of day."""
        context = span.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id)
        span_id = trace.format_span_id(context.span_id)
        self.traceparent = f"00-{self.trace_id}-{span_id}-{context.trace_flags:02x}"
        """W3C trace context, for children in other processes."""
        self.sampled = span.is_recording()
        self._tracer, self._span, self._ahead = tracer, span, ahead

    def begin(self, name: str, start: float, attributes: Attributes = _NONE) -> "TracedSpan":
        """Start a child span."""
        return _begin(
            self._tracer, name, start, trace.set_span_in_context(self._span), attributes, self._ahead
        )

    def end(self, at: float, attributes: Attributes = _NONE, error: str = "") -> None:
        """End the span, once. `error`: why it failed."""
        self._span.set_attributes(_known(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error[:MAX_ERROR]))
        self._span.end(_ns(self._ahead + at))

    def add_hops(self, hops: Iterable[Hop], zero: float) -> None:
        """Add hops as child spans, and those of `DETOURS` as events. `zero`: the time from which their starts count."""
        for hop in hops:
            start, attributes = zero + hop.start, {"pdserve.instance": hop.instance, "pdserve.why": hop.why}
            if hop.name in DETOURS:
                self._span.add_event(hop.name, _known(attributes), _ns(self._ahead + start))
            else:
                self.begin(hop.name, start, attributes).end(start + hop.seconds)


class Tracer:
    """Makes the spans of a process; none outside `exporting`."""

    _tracer: trace.Tracer | None = None

    @property
    def on(self) -> bool:
        return self._tracer is not None

    @asynccontextmanager
    async def exporting(self, endpoint: str, service: str, instance: str) -> AsyncIterator[Self]:
        """Send spans to the collector at this URL, the last ones within a second of the end. This starts a thread, so
        enter it after forks. `service`: the service's name unless the environment gives one. Raises ConfigError."""
        async with import_module("pdserve.observe.otlp").exporting(endpoint, service, instance) as tracer:
            self._tracer = tracer
            try:
                yield self
            finally:
                self._tracer = None

    def request(
        self, name: str, started: float, headers: Mapping[str, Sequence[str]], attributes: Attributes
    ) -> TracedSpan | None:
        """Start the span of an HTTP request. `headers`: all values of `traceparent` and `tracestate`. None outside
        `exporting`, or if the request is not sampled."""
        if self._tracer is None:
            return None
        if len(headers["traceparent"]) > 1:  # ambiguous
            headers = {}
        span = _begin(self._tracer, name, started, _PROPAGATOR.extract(headers), attributes)
        return span if span.sampled else None

    def part(
        self, name: str, started: float, traceparent: str, attributes: Attributes = _NONE
    ) -> TracedSpan | None:
        """Start a child of another process's span. None outside `exporting`, if not sampled, or if `traceparent` is
        invalid."""
        parent = _PROPAGATOR.extract({"traceparent": traceparent})
        if self._tracer is None or not trace.get_current_span(parent).get_span_context().is_valid:
            return None
        span = _begin(self._tracer, name, started, parent, attributes)
        return span if span.sampled else None


def _begin(
    tracer: trace.Tracer,
    name: str,
    started: float,
    parent: Context,
    attributes: Attributes,
    ahead: float | None = None,
) -> TracedSpan:
    ahead = clock.unix() - time.monotonic() if ahead is None else ahead
    kind = _KINDS.get(name.partition(" ")[0], SpanKind.INTERNAL)
    at = _ns(ahead + started)
    return TracedSpan(tracer, tracer.start_span(name, parent, kind, _known(attributes), start_time=at), ahead)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _known(attributes: Attributes) -> dict[str, str | int | float]:
    return {name: value for name, value in attributes.items() if value != ""}
