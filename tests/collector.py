"""An OTLP/HTTP collector of spans for tests. It can be slow or broken."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Exported:
    name: str
    service: str
    process: str
    """instance id"""
    trace_id: str
    span_id: str
    parent: str
    start: int
    end: int
    attributes: Mapping[str, object]
    events: Mapping[str, Mapping[str, object]]
    error: str | None
    """None: no error"""
    tracestate: str


class Collector:
    def __init__(self) -> None:
        self.spans: list[Exported] = []
        self.posts: list[str] = []
        """paths of the POST requests"""
        self.status = 200
        self.answers = threading.Event()
        """cleared: the collector reads requests and does not answer"""
        self.answers.set()
        self.url = ""

    def of(self, trace_id: str) -> list[Exported]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, path: str, body: bytes) -> None:
        self.posts.append(path)
        self.answers.wait(30)
        if self.status != 200:
            return
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            said = _said(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    events = {event.name: _said(event.attributes) for event in span.events}
                    failed = span.status.code == Status.STATUS_CODE_ERROR
                    self.spans.append(
                        Exported(
                            span.name,
                            str(said["service.name"]),
                            str(said["service.instance.id"]),
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _said(span.attributes),
                            events,
                            span.status.message if failed else None,
                            span.trace_state,
                        )
                    )


def _said(attributes: Any) -> dict[str, object]:
    return {each.key: _value(each) for each in attributes}


def _value(attribute: KeyValue) -> object:
    return getattr(attribute.value, str(attribute.value.WhichOneof("value")))


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
