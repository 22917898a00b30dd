"""Both implementations behind one fixture."""

from collections.abc import Callable

import pytest

from pdserve.stream import connect, listen
from pdserve.stream.base import StreamClient, StreamServer


class Streams:
    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self) -> StreamServer:
        return listen(self._host)

    connect: Callable[[str, str], StreamClient] = staticmethod(connect)


@pytest.fixture(params=["memory", "127.0.0.1"], ids=["memory", "zmq"])
def streams(request: pytest.FixtureRequest) -> Streams:
    return Streams(request.param)
