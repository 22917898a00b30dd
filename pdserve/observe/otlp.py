"""Send spans to an OpenTelemetry collector, by OTLP over HTTP, with OpenTelemetry's SDK and its environment variables.

The SDK sends batches in a thread. Spans that the collector refuses are lost, without delay for requests.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from pdserve.util.errors import ConfigError
from pdserve.util.net import is_loopback

END_WITHIN = 1.0
"""Seconds to send the last spans when the process ends."""
LOG_INTERVAL = 600.0
"""Minimum of seconds between two log lines of a logger in `_LOSSES`."""
_LOSSES = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""The SDK's loggers of lost spans: those that the collector refuses, and those that exceed the SDK's queue."""


@asynccontextmanager
async def exporting(endpoint: str, service: str, instance: str) -> AsyncIterator[Tracer]:
    """See `exporting` in `tracing.py`. The SDK's thread is abandoned after `END_WITHIN`: it would
    wait for 30 s, and its request to the collector cannot be cancelled."""
    session = requests.Session()
    # no proxy for a collector on this machine
    session.trust_env = not is_loopback(urlsplit(endpoint).hostname or "")
    named = OTELResourceDetector().detect().attributes
    resource = Resource.create({"service.name": service, **named, "service.instance.id": instance})
    exporter = OTLPSpanExporter(endpoint, session=session)
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise ConfigError([f"OpenTelemetry's SDK refuses its environment variables: {error}"]) from error
    _log_only_losses()
    try:
        yield provider.get_tracer("pdserve")
    finally:
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, END_WITHIN)
        if ending.is_alive():
            exporter.shutdown()  # type: ignore[no-untyped-call]  # stops its retries


class _Seldom(logging.Filter):
    """Passes one record in `LOG_INTERVAL` seconds."""

    _next = float("-inf")

    def filter(self, _: logging.LogRecord) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOG_INTERVAL
        return True


def _log_only_losses() -> None:
    """Silence the SDK's other loggers, because they log values of clients' headers. Call it after the SDK has been set
    up, so that errors about environment variables are still logged."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    for logger in map(logging.getLogger, _LOSSES):
        logger.setLevel(logging.WARNING)
        logger.filters = [_Seldom()]
