"""The decode workers of a model, as the frontend sees them: connections, candidates, and the choice of one."""

from collections.abc import Callable

from pdserve.stream.tcp import TcpStreamClient

Connect = Callable[[str], TcpStreamClient]
"""Makes a client for a decode worker's address, not yet entered."""
