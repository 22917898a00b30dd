"""Both implementations behind one fixture, on both event loops."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from pdserve.stream import connect, listen
from pdserve.stream.base import StreamClient, StreamServer


class Streams:
    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self) -> StreamServer:
        return listen(self._host)

    connect: Callable[[str, str], StreamClient] = staticmethod(connect)


@pytest.fixture(params=["memory", "127.0.0.1"], ids=["memory", "tcp"])
def streams(request: pytest.FixtureRequest) -> Streams:
    return Streams(request.param)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Roles run on uvloop."""
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}
