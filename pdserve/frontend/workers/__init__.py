"""A frontend's connections to the decode workers of one model: `pool` keeps a `link` to each worker, and picks
one of the `candidates` for each request by the `router`'s policy."""

from collections.abc import Callable

from pdserve.stream.tcp import TcpStreamClient

Connect = Callable[[str], TcpStreamClient]
"""Makes a client for a decode worker's address; the caller enters the client."""
