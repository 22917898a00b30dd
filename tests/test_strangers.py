"""A process outside the graph gets nothing from the graph's servers, and a server outside the graph gets nothing from
the graph's processes."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pdserve import registry
from pdserve.queue import connect
from pdserve.queue.jetstream import connection
from pdserve.registry import etcd
from pdserve.security.credentials import Credentials, create
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.util.errors import ConfigError, QueueUnavailable, RegistryUnavailable
from tests.conditions import holds, until
from tests.queue.requests import publish
from tests.servers import etcd_server, nats_server, pid_of
from tests.tcp import of_another_graph, without_certificate

MEMBER_REQUESTS = {
    EmbeddedNats: (b'CONNECT {"verbose":false}\r\nPING\r\n', b"PONG"),
    EmbeddedEtcd: (b"GET /health HTTP/1.0\r\n\r\n", b'"health":"true"'),
}
"""server -> request of a member of the graph, part of the answer"""


@pytest.fixture
def other(tmp_path: Path) -> Credentials:
    return create(tmp_path / "other")


@pytest.fixture(params=[EmbeddedNats, EmbeddedEtcd])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, credentials: Credentials
) -> AsyncIterator[EmbeddedServer]:
    async with request.param(tmp_path, credentials=credentials) as started:
        yield started


async def sent(port: int, question: bytes, tls: ssl.SSLContext | None) -> bytes:
    """Return everything that the port sends to this client."""
    answer = b""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if tls is not None:
                with suppress(TimeoutError):  # NATS speaks first
                    async with asyncio.timeout(0.3):
                        await reader.readline()
                await writer.start_tls(tls)
            writer.write(question)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while part := await reader.read(4096):
                        answer += part
        finally:
            writer.close()
    return answer


async def test_no_port_reveals_anything_without_credentials(
    server: EmbeddedServer, other: Credentials, credentials: Credentials
) -> None:
    """This includes the ports for cluster peers."""
    listening = [
        end.laddr
        for end in psutil.Process(pid_of(server)).net_connections("tcp")
        if end.status == psutil.CONN_LISTEN
    ]
    question, right = MEMBER_REQUESTS[type(server)]
    assert server.port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    strangers = (None, without_certificate(other), of_another_graph(other))
    answers = await asyncio.gather(
        *(sent(address.port, question, stranger) for address in listening for stranger in strangers)
    )
    for answer in answers:
        # NATS describes itself before TLS; all may send errors
        lines = [line for line in answer.splitlines() if not line.startswith((b"INFO ", b"-ERR "))]
        assert lines in (
            [],
            [b"HTTP/1.0 400 Bad Request", b"", b"Client sent an HTTP request to an HTTPS server."],
        )
    member = credentials.client_context()
    member.minimum_version = ssl.TLSVersion.TLSv1_2
    assert right in await sent(server.port, question, member)


async def test_no_prompt_goes_to_an_impostor_of_nats(
    tmp_path: Path, credentials: Credentials, nats_url: str
) -> None:
    """Another user of this machine may have taken the port of a server that is down."""
    with pytest.raises(ConfigError, match=r"has no TLS, but Security\.credentials is set"):
        async with connect(nats_url, "ns", "m", credentials):
            pass

    server = nats_server(tmp_path / "ours", credentials=credentials)
    impostor = create(tmp_path / "theirs" / "credentials")
    await server.start()
    async with connect(server.url, "ns", "m", credentials) as queue:
        for made_by in (None, impostor):
            await publish(queue, "before")
            await server.stop()
            await until(lambda: not queue.connected)
            async with nats_server(tmp_path / "theirs", server.port, credentials=made_by):
                await holds(lambda: not queue.connected, 3 * connection.RETRY_INTERVAL)
                with pytest.raises(QueueUnavailable):
                    await publish(queue, "secret")
            await server.start()
            await until(lambda: queue.connected)
        await server.stop()


async def test_etcd_and_its_clients_refuse_other_credentials(
    tmp_path: Path,
    credentials: Credentials,
    other: Credentials,
    etcd_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 1.5)
    # the graph's authority with another graph's certificate, which that authority has not signed
    for name in ("node.pem", "node-key.pem"):
        (tmp_path / name).write_bytes((other.folder / name).read_bytes())
    (tmp_path / "ca.pem").write_bytes(credentials.authority.read_bytes())

    async def refused(url: str, stranger: Credentials | None) -> None:
        with pytest.raises(RegistryUnavailable, match=r"no etcd answers at .* \(.+\)"):
            async with registry.connect(url, "ns", stranger):
                pass

    server = etcd_server(tmp_path, credentials=credentials)
    async with server, registry.connect(server.url, "ns", credentials) as ours:
        await ours.put("a", b"1")
        strangers = [(server.url, each) for each in (None, other, Credentials(tmp_path))]
        without_tls = (etcd_url, credentials)
        await asyncio.gather(*(refused(*each) for each in (*strangers, without_tls)))
        assert await ours.read("") == {"a": b"1"}
