"""A worker's own Prometheus page."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server


@contextmanager
def serve_metrics(host: str) -> Iterator[str]:
    """Serve everything in the default registry on a free port; yields the page's URL."""
    server, thread = start_http_server(0, host)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
