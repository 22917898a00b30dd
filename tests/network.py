"""Simulated hosts for tests, if this machine supports them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pdserve_bench.hosts.network import Network, network

from pdserve.util.errors import Unavailable


@contextmanager
def hosts(folder: Path) -> Iterator[Network]:
    """`with hosts(tmp_path) as net: net.host("a").start(...)`; skips the test, with the reason, where simulated
    hosts are not permitted."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(network(folder))
            found.host("first").vanish()
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield found
