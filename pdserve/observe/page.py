"""A worker's own Prometheus page."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from pdserve.observe.metrics import TASKS


@contextmanager
def serve_metrics(host: str) -> Iterator[str]:
    """Serve everything in the default registry on a free port; yields the page's URL. To be called in the
    process's event loop, whose tasks are counted."""
    loop = asyncio.get_running_loop()
    TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    server, thread = start_http_server(0, host)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
