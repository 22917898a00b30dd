"""The decode workers of one model, as a frontend uses them: `pool` keeps a `link` to each, and picks one for a request
among the `candidates` by the `router`'s policy."""

from collections.abc import Callable

from pdserve.stream.tcp import TcpStreamClient

Connect = Callable[[str], TcpStreamClient]
"""Makes a client for a decode worker's address, which the caller enters."""
