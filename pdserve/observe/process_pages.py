"""The HTTP pages of each process (metrics, reports, liveness, readiness), and functions that read the pages of many
processes. The pages are read-only, have no text of requests, and are open to all that reach `Graph.host`. On loopback,
requests whose Host header names another machine (DNS rebinding) are refused."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import httpx
import msgspec
from msgspec import Struct
from prometheus_client import make_wsgi_app

from pdserve.contract.messages import safe_decoder
from pdserve.contract.records import Instance
from pdserve.contract.reports import MAX_REPORTED_RECEIPTS, ProcessReport, Receipt, newest_receipts
from pdserve.observe.metrics import TASKS
from pdserve.util.errors import ProtocolError
from pdserve.util.net import is_local_host_header, is_loopback

METRICS, WATCH, RECEIPTS = "/metrics", "/watch", "/receipts"
LIVE, READY = "/live", "/ready"
"""Liveness and readiness: 200, or 503 with the reason."""
LOOP_TIMEOUT = 1.0
"""Seconds for the process's event loop to make a page."""
READ_TIMEOUT = 2.0
"""Seconds for a request to another process's pages."""
MAX_READS = 128
"""Maximum of processes that are read at the same time."""
MAX_OPEN = 32
"""Connections to a process's pages, each with a thread; a further one closes the oldest."""
CLIENT_TIMEOUT = 5.0
"""Seconds after which a client that neither sends nor reads is disconnected."""

T = TypeVar("T")

_decode_watched = safe_decoder(msgspec.json.Decoder(ProcessReport).decode)
_decode_receipts = safe_decoder(msgspec.json.Decoder(list[Receipt]).decode)


class ProcessPages:
    def __init__(self, url: str) -> None:
        self.metrics = url + METRICS
        """URL of the metrics; the other pages have the same host and port."""
        self.fault: Callable[[], str] = str
        self.unready: Callable[[], str] = lambda: "it is starting"
        self.watched: Callable[[], ProcessReport] = ProcessReport
        self.receipts: Callable[[int, str | None, str], list[Receipt]] = lambda limit, key, request_id: []
        """These four are functions of the `Service`, called in the event loop."""


@contextmanager
def serve_pages(host: str, port: int = 0) -> Iterator[ProcessPages]:
    """Serve this process's pages from a thread, by default on a free port. Call it in the process's event loop: the
    metrics count the loop's tasks."""
    loop = asyncio.get_running_loop()
    TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    server = _PagesServer(host, port)
    # a forked engine core may outlive this process, and must not keep the port open
    os.register_at_fork(after_in_child=server.socket.close)
    at = f"[{host}]" if ":" in host else host
    pages, metrics = ProcessPages(f"http://{at}:{server.server_port}"), make_wsgi_app()
    asking = threading.Lock()  # one call at a time, so that the event loop can work between two

    def respond(environ: dict[str, Any], start_response: Any) -> Any:
        path: str = environ["PATH_INFO"]
        if is_loopback(host) and not is_local_host_header(environ.get("HTTP_HOST", "localhost")):
            start_response("403 Forbidden", [])
            return []
        if path not in (WATCH, RECEIPTS, LIVE, READY):
            return metrics(environ, start_response)
        try:
            with asking:
                answer = _in_loop(loop, _question(pages, path, environ.get("QUERY_STRING", "")))
        except Exception:  # the process is starting, ending or hanging
            answer = _Status("its event loop does not respond")
        well = not isinstance(answer, _Status) or answer.status == "ok"
        status = "200 OK" if well else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [msgspec.json.encode(answer)]

    server.set_app(respond)
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield pages
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Status(Struct):
    status: str


def _question(pages: ProcessPages, path: str, query: str) -> Callable[[], Struct | list[Receipt]]:
    """The function to call in the event loop for this page."""
    if path == WATCH:
        return pages.watched
    if path != RECEIPTS:
        wrong = pages.fault if path == LIVE else pages.unready
        return lambda: _Status(wrong() or "ok")
    asked = parse_qs(query, keep_blank_values=True)
    limit, key, request_id = (asked.get(name, [None])[0] for name in ("limit", "key", "id"))
    most = int(limit) if limit and limit.isdecimal() and len(limit) < 4 else MAX_REPORTED_RECEIPTS
    return partial(pages.receipts, min(most, MAX_REPORTED_RECEIPTS), key, request_id or "")


class _PagesHandler(WSGIRequestHandler):
    @property
    def timeout(self) -> float:  # type: ignore[override]
        return CLIENT_TIMEOUT

    def log_message(self, *_: object) -> None:
        """Log no requests."""


class _PagesServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        self.address_family, address = resolved[0][0], str(resolved[0][4][0])
        self._open: dict[Any, None] = {}
        super().__init__((address, port), _PagesHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        for oldest in list(self._open)[: max(0, len(self._open) + 1 - MAX_OPEN)]:
            self._open.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have left, or were too slow."""


def _in_loop(loop: asyncio.AbstractEventLoop, question: Callable[[], T]) -> T:
    """Call `question` in the event loop. Raises its errors, and TimeoutError."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    loop.call_soon_threadsafe(call)
    return answer.result(LOOP_TIMEOUT)


async def read_watched(
    instances: Iterable[Instance], client: httpx.AsyncClient | None = None
) -> dict[str, ProcessReport]:
    """By instance id, reports of processes that respond. Pass a client to keep connections between calls."""
    return await _read_all(instances, WATCH, _decode_watched, client)


async def read_receipts(
    instances: Iterable[Instance], limit: int, key: str | None = None, request_id: str = ""
) -> list[Receipt]:
    """Receipts, newest first; with `key`, of the API key of this name; with `request_id`, of this request."""
    asked = {"limit": limit, "id": request_id} | ({} if key is None else {"key": key})
    reported = await _read_all(instances, f"{RECEIPTS}?{urlencode(asked)}", _decode_receipts)
    return newest_receipts(limit, *reported.values())


async def _read_all(
    instances: Iterable[Instance],
    page: str,
    decode: Callable[[bytes | memoryview], T],
    client: httpx.AsyncClient | None = None,
) -> dict[str, T]:
    if client is None:
        # trust_env: no proxy between the processes of a graph
        async with httpx.AsyncClient(trust_env=False, verify=False) as own:
            return await _read_all(instances, page, decode, own)
    asking = asyncio.Semaphore(MAX_READS)
    answers: dict[str, T] = {}

    async def read(instance: Instance) -> None:
        try:
            async with asking, asyncio.timeout(READ_TIMEOUT):
                answer = await client.get(instance.metrics.removesuffix(METRICS) + page)
            if answer.status_code == 200:
                answers[instance.id] = decode(answer.content)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ProtocolError):
            pass

    await asyncio.gather(*map(read, instances))
    return answers
