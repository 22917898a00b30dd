"""Streams with TLS, and peers without the graph's credentials."""

import asyncio
import random
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import pytest

from pdserve.contract.messages import Hello, Outputs
from pdserve.security.credentials import Credentials
from pdserve.stream import tcp
from pdserve.stream.tcp import GREETING, TcpStreamClient, TcpStreamServer
from pdserve.util.errors import PeerGone
from tests.conditions import until
from tests.stream.conftest import HOST
from tests.stream.raw import client_hello, frame, raw
from tests.tcp import of_another_graph, without_certificate

GREETS = frame(GREETING + b" stranger")


def _older_tls(others: Credentials) -> ssl.SSLContext:
    context = of_another_graph(others)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("context", [without_certificate, of_another_graph, _older_tls])
async def test_a_frontend_of_no_or_another_graph_is_refused(
    credentials: Credentials,
    strangers: Credentials,
    context: Callable[[Credentials], ssl.SSLContext],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TLS 1.3 lets a client send before the server has read the client's certificate."""
    async with TcpStreamServer(HOST, credentials) as server:
        received = asyncio.ensure_future(anext(server.received()))
        with suppress(ssl.SSLError, ConnectionError):
            async with raw(server.address, context(strangers)) as stranger:
                stranger.send(GREETS)
                with suppress(ssl.SSLError):
                    assert GREETING not in await stranger.reader.read()
        await until(lambda: server._refused == {HOST: 1})
        assert not server._frontends
        assert not received.done()
        async with TcpStreamClient(server.address, "f", credentials) as client:
            await client.send(Hello("1"))
            assert await received == ("f", Hello("1"))
    assert "failed in TLS, as of another graph" in caplog.text


async def test_a_worker_of_another_graph_gets_nothing(
    credentials: Credentials, strangers: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """Its address may be in etcd, or it may have got the port of an earlier worker."""
    async with TcpStreamServer(HOST, strangers) as server:
        with pytest.raises(PeerGone):
            async with TcpStreamClient(server.address, "f", credentials):
                pass
        await until(lambda: bool(server._refused))
        assert not server._frontends
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


@pytest.mark.parametrize("server_has", [True, False])
async def test_plain_and_tls_ends_refuse_each_other(
    credentials: Credentials, server_has: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The address's scheme already prevents the connection; with a wrong scheme, the handshake fails."""
    caplog.set_level("INFO")
    of_server, of_client = (credentials, None) if server_has else (None, credentials)
    async with TcpStreamServer(HOST, of_server) as server:
        with pytest.raises(PeerGone):
            async with TcpStreamClient(server.address, "f", of_client):
                pass
        assert "as all of this graph must be" in caplog.text
        assert not server._refused
        scheme = "tcp" if server_has else "tls"
        with pytest.raises(PeerGone):
            async with TcpStreamClient(f"{scheme}://{server.address.partition('://')[2]}", "f", of_client):
                pass
        await until(lambda: server._refused == {HOST: 1})
        assert not server._frontends


# unfinished handshakes, damaged bytes, and the end of TLS


@pytest.mark.usefixtures("quick_beats")
async def test_connections_that_do_not_greet_are_ended(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finished` completes the handshake and sends no greeting."""
    monkeypatch.setattr(tcp, "GREETING_TIMEOUT", 1.0)
    hello = client_hello(credentials)
    async with (
        TcpStreamServer(HOST, credentials) as server,
        raw(server.address) as mute,
        raw(server.address) as begun,
        raw(server.address) as half,
        raw(server.address, credentials.client_context()) as finished,
    ):
        begun.send(hello)
        half.send(hello[: len(hello) // 2])
        await until(lambda: len(server._ungreeted) == 4)
        for stranger in (mute, begun, half, finished):
            assert await stranger.closed()
        assert not server._ungreeted
        assert server._refused == {HOST: 4}


async def test_bytes_of_any_kind_end_only_their_connection(credentials: Credentials) -> None:
    """One third of the connections send random bytes, the others a handshake with a few bytes changed. To every second
    handshake, random bytes are added."""
    chance, hello = random.Random(0), client_hello(credentials)
    count = 300
    async with (
        TcpStreamServer(HOST, credentials) as server,
        TcpStreamClient(server.address, "f", credentials) as client,
    ):
        for number in range(count):
            data = bytearray(hello if number % 3 else chance.randbytes(chance.randrange(1, 2000)))
            for _ in range(chance.randrange(5)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if number % 3 == 2:
                data += chance.randbytes(chance.randrange(20_000))
            with socket.create_connection((HOST, int(server.address.rpartition(":")[2]))) as end:
                with suppress(OSError):
                    end.sendall(data)
                await asyncio.sleep(0)
        await until(lambda: server._refused == {HOST: count})
        assert not server._ungreeted
        await client.send(Hello("1"))
        assert await anext(server.received()) == ("f", Hello("1"))


async def test_damaged_bytes_end_a_tls_connection(credentials: Credentials) -> None:
    """No message is read from the damaged bytes."""
    async with (
        TcpStreamServer(HOST, credentials) as server,
        TcpStreamClient(server.address, "f", credentials) as client,
    ):
        transport, tls = server._frontends["f"]._transport, server._frontends["f"]._tls
        assert transport
        assert tls
        record = bytearray(tls.encrypt(frame(b"x" * 100)))
        record[-1] ^= 1
        transport.write(record)
        await server.send("f", Outputs([b"after"]))
        with pytest.raises(PeerGone):
            await anext(client.received())


async def test_a_frontend_that_ends_tls_is_disconnected(credentials: Credentials) -> None:
    """The frontend leaves the TCP connection open."""
    context = credentials.client_context()
    received, unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, unsent)
    async with TcpStreamServer(HOST, credentials) as server, raw(server.address) as end:
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        end.send(unsent.read())
        received.write(await end.reader.read(10_000))
        tls.do_handshake()
        tls.write(frame(GREETING + b" f"))
        end.send(unsent.read())
        await until(lambda: "f" in server._frontends)
        with suppress(ssl.SSLWantReadError):
            tls.unwrap()
        end.send(unsent.read())
        await until(lambda: "f" not in server._frontends)
