"""OpenTelemetry traces: the spans of this process's part of a request (docs/traces.md lists them all).

Like receipts, spans are made of the request's hops, most of them when it is over and with given times. A span with
children in other processes (a request, and each of its attempts at a decode worker) is begun when it begins, since the
children need its id, which `Submit` and `PrefillRequest` carry. What is not traced or not sampled has no span: None.
Of OpenTelemetry only the API is imported here, and the SDK (`otlp.py`) where there is a collector.
"""

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
"""empty strings are left out"""

MAX_ERROR = 300
"""characters"""
_NONE: Attributes = {}
_KINDS = {"POST": SpanKind.SERVER, "attempt": SpanKind.CLIENT, "generate": SpanKind.SERVER}
"""by the first word of a span's name; others are internal"""
_PROPAGATOR = TraceContextTextMapPropagator()


class TracedSpan:
    """A begun span. Times are monotonic seconds; a span and its children share one reading of the time of day."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, ahead: float) -> None:
        """`ahead`: time of day minus monotonic time, in seconds."""
        context = span.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id)
        span_id = trace.format_span_id(context.span_id)
        self.traceparent = f"00-{self.trace_id}-{span_id}-{context.trace_flags:02x}"
        """W3C trace context, for its children in other processes"""
        self.sampled = span.is_recording()
        self._tracer, self._span, self._ahead = tracer, span, ahead

    def begin(self, name: str, start: float, attributes: Attributes = _NONE) -> "TracedSpan":
        """Begin a child span."""
        return _begin(
            self._tracer, name, start, trace.set_span_in_context(self._span), attributes, self._ahead
        )

    def end(self, at: float, attributes: Attributes = _NONE, error: str = "") -> None:
        """End it, once; `error` says why it failed."""
        self._span.set_attributes(_known(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error[:MAX_ERROR]))
        self._span.end(_ns(self._ahead + at))

    def add_hops(self, hops: Iterable[Hop], zero: float) -> None:
        """Add hops as child spans, detours as events; `zero` is the time that their starts count from."""
        for hop in hops:
            start, attributes = zero + hop.start, {"pdserve.instance": hop.instance, "pdserve.why": hop.why}
            if hop.name in DETOURS:
                self._span.add_event(hop.name, _known(attributes), _ns(self._ahead + start))
            else:
                self.begin(hop.name, start, attributes).end(start + hop.seconds)


class Tracer:
    """One process's; without `exporting` it traces nothing."""

    _tracer: trace.Tracer | None = None

    @property
    def on(self) -> bool:
        return self._tracer is not None

    @asynccontextmanager
    async def exporting(self, endpoint: str, service: str, instance: str) -> AsyncIterator[Self]:
        """Send spans to the collector at this URL, the last ones within a second of the end. This starts a thread: do
        so after the process has forked. `service`: its name where the environment gives none. Raises ConfigError."""
        async with import_module("pdserve.observe.otlp").exporting(endpoint, service, instance) as tracer:
            self._tracer = tracer
            try:
                yield self
            finally:
                self._tracer = None

    def request(
        self, name: str, started: float, headers: Mapping[str, Sequence[str]], attributes: Attributes
    ) -> TracedSpan | None:
        """Begin the span of an HTTP request. `headers` has all its values of `traceparent` and `tracestate`. None where
        the request is not sampled."""
        if self._tracer is None:
            return None
        if len(headers["traceparent"]) > 1:  # which one is right is unknown
            headers = {}
        span = _begin(self._tracer, name, started, _PROPAGATOR.extract(headers), attributes)
        return span if span.sampled else None

    def part(
        self, name: str, started: float, traceparent: str, attributes: Attributes = _NONE
    ) -> TracedSpan | None:
        """Begin a child of another process's span; None where `traceparent` names none."""
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
