"""Fixtures of streams, plain and with TLS, on uvloop, which the roles use."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest

from pdserve.security.credentials import Credentials, create
from pdserve.stream import framing, tcp
from pdserve.stream.tcp import FRONTEND_SILENCE, WORKER_SILENCE, TcpStreamClient, TcpStreamServer
from tests.stream.raw import Raw, raw
from tests.uvloops import Loop

HOST = "127.0.0.1"


@dataclass
class Wire:
    """TCP, plain or with TLS."""

    credentials: Credentials | None

    @property
    def scheme(self) -> str:
        return "tls" if self.credentials else "tcp"

    def server_context(self) -> ssl.SSLContext | None:
        return self.credentials.server_context() if self.credentials else None

    def server(self, silence: float = FRONTEND_SILENCE) -> TcpStreamServer:
        return TcpStreamServer(HOST, self.credentials, silence)

    def client(self, address: str, name: str, silence: float = WORKER_SILENCE) -> TcpStreamClient:
        return TcpStreamClient(address, name, self.credentials, silence)

    def raw(self, address: str) -> AbstractAsyncContextManager[Raw]:
        return raw(address, self.credentials.client_context() if self.credentials else None)


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """Credentials of another graph."""
    return create(tmp_path_factory.mktemp("credentials") / "other-graph")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer connect timeout, because TLS handshakes are slow on a busy machine."""
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT", 60.0)


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send heartbeats every 0.25 s, so that a silence timeout of 1 s is long enough on a busy machine."""
    monkeypatch.setattr(framing, "HEARTBEAT_INTERVAL", 0.25)


@pytest.fixture(params=["tcp", "tls"])
def wire(request: pytest.FixtureRequest, credentials: Credentials) -> Wire:
    return Wire(credentials if request.param == "tls" else None)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": Loop}
