"""Send spans to an OpenTelemetry collector, by OTLP over HTTP, with OpenTelemetry's SDK and its environment variables.

The SDK sends batches in a thread. Spans that the collector does not take are lost, and cost the requests nothing.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve import clock
from pdserve.errors import ConfigError
from pdserve.observe.tracing import NONE, Attributes, TracedSpan, Tracer
from pdserve.ports import is_loopback

log = logging.getLogger(__name__)

END_WITHIN = 1.0
"""seconds to send the last spans when the process ends"""
AGAIN = 600.0
"""seconds after which a loss is logged again"""
MAX_ERROR = 300
"""characters"""
_EXPORTER, _PROCESSOR = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
_KINDS = {"attempt": SpanKind.CLIENT, "generate": SpanKind.SERVER}
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracer(Tracer):
    on = True

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """`service`: its name where the environment gives none."""
        self._endpoint = endpoint
        named = OTELResourceDetector().detect().attributes
        self._resource = Resource.create({"service.name": service, **named, "service.instance.id": instance})
        self._tracer: SdkTracer | None = None

    async def __aenter__(self) -> Self:
        """Raises ConfigError."""
        self._exporter = _Exporter(self._endpoint)
        try:
            self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except ValueError as error:
            raise ConfigError([f"OpenTelemetry's SDK refuses its environment variables: {error}"]) from error
        self._tracer = self._provider.get_tracer("pdserve")
        _take_over_logging(self._exporter)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the SDK's thread behind after `END_WITHIN`: it would wait for 30 s, and nothing can end its request to
        the collector."""
        self._tracer = None
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=end, name="last spans", daemon=True).start()
        try:
            await asyncio.wait_for(over.wait(), END_WITHIN)
        except TimeoutError:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it does not try again

    def request(
        self, name: str, started: float, headers: Mapping[str, Sequence[str]], attributes: Attributes
    ) -> TracedSpan | None:
        if len(headers["traceparent"]) > 1:  # which one is right is unknown
            headers = {}
        parent = get_current_span(_PROPAGATOR.extract(headers))
        return self._begin(name, started, parent, SpanKind.SERVER, attributes)

    def part(
        self, name: str, started: float, traceparent: str, attributes: Attributes = NONE
    ) -> TracedSpan | None:
        parent = get_current_span(_PROPAGATOR.extract({"traceparent": traceparent}))
        if not parent.get_span_context().is_valid:
            return None
        return self._begin(name, started, parent, _KINDS.get(name, SpanKind.INTERNAL), attributes)

    def _begin(
        self, name: str, started: float, parent: Span, kind: SpanKind, attributes: Attributes
    ) -> TracedSpan | None:
        if self._tracer is None:  # the process starts, or ends
            return None
        ahead = clock.unix() - time.monotonic()
        span = self._tracer.start_span(
            name, set_span_in_context(parent), kind, _said(attributes), start_time=_ns(ahead + started)
        )
        return _Span(self._tracer, span, ahead) if span.is_recording() else None


class _Span(TracedSpan):
    def __init__(self, tracer: SdkTracer, span: Span, ahead: float) -> None:
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.traceparent = f"00-{self.trace_id}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
        self._tracer = tracer
        self._span = span
        self._ahead = ahead
        """time of day minus monotonic time, in seconds"""

    def begin(self, name: str, start: float, attributes: Attributes = NONE) -> "_Span":
        span = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            _KINDS.get(name, SpanKind.INTERNAL),
            _said(attributes),
            start_time=_ns(self._ahead + start),
        )
        return _Span(self._tracer, span, self._ahead)

    def event(self, name: str, at: float, attributes: Attributes = NONE) -> None:
        self._span.add_event(name, _said(attributes), _ns(self._ahead + at))

    def end(self, at: float, attributes: Attributes = NONE, error: str = "") -> None:
        self._span.set_attributes(_said(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error[:MAX_ERROR]))
        self._span.end(_ns(self._ahead + at))


class _Exporter(OTLPSpanExporter):
    """Logs that spans are lost, once in `AGAIN` seconds."""

    def __init__(self, endpoint: str) -> None:
        session = None
        if is_loopback(urlsplit(endpoint).hostname or ""):
            session = requests.Session()
            session.trust_env = False  # a proxy of the environment is not for this machine
        super().__init__(endpoint=endpoint, session=session)
        self._to = urlsplit(endpoint).netloc.rpartition("@")[2]
        self._told = -AGAIN
        self.reason = ""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.FAILURE:
            self.lost()
        return result

    def lost(self) -> None:
        if time.monotonic() >= self._told + AGAIN:
            self._told = time.monotonic()
            why = f"{self.reason}; this is logged once in {AGAIN / 60:.0f} minutes"
            log.warning("spans for %s are lost, requests are served as before: %s", self._to, why)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _said(attributes: Attributes) -> dict[str, str | int | float]:
    return {name: value for name, value in attributes.items() if value != ""}


class _Losses(logging.Filter):
    """Replaces the SDK's log lines, one for each batch and attempt."""

    def __init__(self, exporter: _Exporter) -> None:
        super().__init__()
        self._exporter = exporter

    def filter(self, record: logging.LogRecord) -> bool:
        if "full" in record.msg:
            self._exporter.reason = "they come faster than they are taken"
            self._exporter.lost()
        elif "max retries" not in record.msg or not self._exporter.reason:  # why comes before, if at all
            self._exporter.reason = record.getMessage()[:MAX_ERROR]
        return False


def _take_over_logging(exporter: _Exporter) -> None:
    """Silence the SDK, which would log what clients write into headers. What is wrong with its environment variables it
    has said when it was made."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    for name in (_EXPORTER, _PROCESSOR):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        for old in [each for each in logger.filters if isinstance(each, _Losses)]:
            logger.removeFilter(old)
        logger.addFilter(_Losses(exporter))
