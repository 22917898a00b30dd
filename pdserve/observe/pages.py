"""The HTTP pages of each process beside its work, its metrics and its load, and how the loads of many are read.
Anything that reaches `Graph.host` may read them: they change nothing, and have no text of a request."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import httpx
import msgspec
from prometheus_client import make_wsgi_app

from pdserve.messages import Load, reader
from pdserve.observe.metrics import TASKS
from pdserve.records import Instance, encode_record

METRICS, LOAD = "/metrics", "/load"
TOLD_WITHIN = 1.0
"""seconds that a process's event loop gets to tell its load"""
READ_WITHIN = 2.0
"""seconds for the answer of one process"""
AT_ONCE = 128
"""processes that are asked at the same time"""
MAX_OPEN = 32
"""connections to the pages of a process, each with a thread; beyond, the oldest is closed"""
SILENT_FOR = 5.0
"""seconds after which a client that sends or takes nothing is given up"""

_decode_load = reader(msgspec.json.Decoder(Load).decode)


class ProcessPages:
    def __init__(self, url: str) -> None:
        self.metrics = url + METRICS
        """URL of the metrics; the load is beside them"""
        self.load: Callable[[], Load] = Load
        """called in the event loop"""


@contextmanager
def serve_pages(host: str) -> Iterator[ProcessPages]:
    """Serve this process's pages on a free port, from a thread. Call it in the process's event loop, whose tasks are
    counted."""
    loop = asyncio.get_running_loop()
    TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    server = _PagesServer(host)
    # an engine core is a fork: it must not listen for this process, which it may outlive
    os.register_at_fork(after_in_child=server.socket.close)
    at = f"[{host}]" if ":" in host else host
    pages, metrics = ProcessPages(f"http://{at}:{server.server_port}"), make_wsgi_app()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] != LOAD:
            return metrics(environ, start_response)
        try:
            body, status = encode_record(_in_loop(loop, pages.load)), "200 OK"
        except Exception:  # the process starts, ends or hangs
            body, status = b"{}", "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [body]

    server.set_app(answer)
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield pages
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _PagesHandler(WSGIRequestHandler):
    @property
    def timeout(self) -> float:  # type: ignore[override]
        return SILENT_FOR

    def log_message(self, *_: object) -> None:
        """Nothing."""


class _PagesServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str) -> None:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        self.address_family, address = found[0][0], str(found[0][4][0])
        self._open: dict[Any, None] = {}
        super().__init__((address, 0), _PagesHandler)

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
        """The client is gone, or was too slow."""


def _in_loop(loop: asyncio.AbstractEventLoop, question: Callable[[], Load]) -> Load:
    """Raises what the question raises, and TimeoutError."""
    told: Future[Load] = Future()

    def tell() -> None:
        try:
            told.set_result(question())
        except Exception as error:
            told.set_exception(error)

    loop.call_soon_threadsafe(tell)
    return told.result(TOLD_WITHIN)


async def read_loads(instances: Iterable[Instance]) -> dict[str, Load]:
    """By instance id; a process that does not answer is left out."""
    asking = asyncio.Semaphore(AT_ONCE)
    loads: dict[str, Load] = {}

    async def read(instance: Instance) -> None:
        try:
            async with asking, asyncio.timeout(READ_WITHIN):
                answer = await client.get(instance.metrics.removesuffix(METRICS) + LOAD)
            if answer.status_code == 200:
                loads[instance.id] = _decode_load(answer.content)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
            pass

    # trust_env: no proxy of the environment stands between the processes of a graph
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        await asyncio.gather(*map(read, instances))
    return loads
