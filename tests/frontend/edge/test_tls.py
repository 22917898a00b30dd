"""TLS on real sockets: handshake, close_notify, and renewal of the certificate. Tests that run with and without TLS
are in `test_sockets.py`."""

import asyncio
import socket
import ssl
import time
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from prometheus_client import REGISTRY
from uvicorn.server import ServerState

from pdserve.frontend.edge.certificate_reload import RenewedCertificate
from pdserve.frontend.edge.connections import ClientConnections
from pdserve.frontend.server import http_config
from pdserve.observe.metrics import CONNECTIONS_CLOSED, TASK_FAILURES
from pdserve.security.certificate import ServerCertificate
from pdserve.security.credentials import VALIDITY, create
from pdserve.util import clock
from pdserve.util.errors import ConfigError
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, in_session, serve, trusting
from tests.frontend.edge.test_sockets import Address, ask, client, server, silent


@in_session
async def test_only_tls_1_2_and_1_3_with_http_1_1_are_accepted(
    graph: Graph, certificate: ServerCertificate
) -> None:
    async with server(graph, certificate) as address:

        def agreed(context: ssl.SSLContext) -> tuple[str | None, str | None]:
            context.set_alpn_protocols(["h2", "http/1.1"])
            with (
                socket.create_connection(address) as sock,
                context.wrap_socket(sock, server_hostname="localhost") as tls,
            ):
                return tls.version(), tls.selected_alpn_protocol()

        for newest, name in ((ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "TLSv1.2")):
            context = trusting(certificate)
            context.maximum_version = newest
            assert await asyncio.to_thread(agreed, context) == (name, "http/1.1")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(agreed, context)


@in_session
async def test_an_unfinished_handshake_ends_the_connection(
    graph: Graph, certificate: ServerCertificate
) -> None:
    async def ended(address: Address, hello: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(hello)
        with suppress(ConnectionError):
            assert not await reader.read()
        writer.close()

    connections, started = ClientConnections(0.4, 30.0), time.monotonic()
    async with server(graph, certificate, connections) as address, asyncio.timeout(30):
        hellos = b"", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01"
        await asyncio.gather(*(ended(address, hello) for hello in hellos))
        assert time.monotonic() - started > 0.3
        await until(lambda: not connections._entered)


@in_session
async def test_a_client_without_close_notify_is_dropped(graph: Graph, certificate: ServerCertificate) -> None:
    connections = ClientConnections(30.0, 4.0, pause_after=0.2)
    async with server(graph, certificate, connections) as address, client(address, certificate) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await until(lambda: bool(connections.open))
        await until(lambda: not connections.open)
        assert b"vllm" in sock.recv(4096) + sock.recv(4096)


@in_session
async def test_sweeps_go_on_after_a_connection_whose_check_fails(certificate: ServerCertificate) -> None:
    connections = ClientConnections(0.4, 30.0)
    async with AsyncExitStack() as stack:
        url = await serve(silent, stack, connections, RenewedCertificate(certificate))
        failed = TASK_FAILURES.labels("client connections")._value.get()
        broken = connections(http_config(silent, connections, 1.0), ServerState(), {})
        assert connections.enter(broken)
        connections.open.add(broken)  # without a transport, so that checking and closing it fail
        there = await stack.enter_async_context(client(address_of(url), certificate))
        assert b" 408 " in await asyncio.to_thread(there.recv, 4096), "the sweeps go on"
        assert broken not in connections.open
        assert TASK_FAILURES.labels("client connections")._value.get() >= failed + 2
        await until(lambda: not connections._entered)


@pytest.mark.parametrize("way", ["close_notify", "half-close", "TCP close"])
@in_session
async def test_a_client_that_leaves_ends_its_request(
    graph: Graph, certificate: ServerCertificate, way: str
) -> None:
    async with graph.worker(pace=None) as decode, server(graph, certificate) as address:
        await until(lambda: bool(graph.models.usable_workers().get("demo")))
        async with client(address, certificate) as sock:
            ask(sock)
            await decode.until(lambda: decode.jobs)
            if way == "close_notify":
                with suppress(TimeoutError, OSError):
                    sock.settimeout(0.1)
                    assert isinstance(sock, ssl.SSLSocket)
                    sock.unwrap()
            elif way == "half-close":
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.close()
            await decode.until(lambda: not decode.jobs)


@in_session
async def test_a_failed_handshake_ends_the_connection_and_is_counted(
    graph: Graph, certificate: ServerCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    """The failures are a port probe, and plain HTTP."""
    connections, failed = ClientConnections(30.0, 30.0), CONNECTIONS_CLOSED.labels("handshake")
    async with server(graph, certificate, connections) as address, httpx.AsyncClient() as http:
        before = failed._value.get()
        socket.create_connection(address).close()
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{address[0]}:{address[1]}/health")
        await until(lambda: not connections._entered)
        assert failed._value.get() == before + 2
    assert not [record for record in caplog.records if record.levelname != "INFO"]


# the certificate


def made(folder: Path, valid: timedelta = VALIDITY) -> ServerCertificate:
    files = create(folder, valid=valid)
    return ServerCertificate(files.certificate, files.key)


def shown_end() -> float:
    """Return the time at which the API's certificate expires, from the metric."""
    return REGISTRY.get_sample_value("pdserve_certificate_end_seconds", {"certificate": "api"}) or 0.0


def test_wrong_certificate_files_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    good, other = made(tmp_path / "good"), made(tmp_path / "other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not PEM")
    good.context()
    wrong = {
        r"tls-certificate: .*nowhere cannot be read \(No such file": (tmp_path / "nowhere", good.key),
        r"tls-key: .*nowhere cannot be read \(No such file": (good.chain, tmp_path / "nowhere"),
        r"tls-key: .* cannot be read \(Is a directory": (good.chain, tmp_path),
        r"holds no certificate in PEM": (garbage, good.key),
        r"tls-key: .*garbage.pem cannot be used": (good.chain, garbage),
        r"is not the key of the first certificate in": (good.chain, other.key),
    }
    for message, (chain, key) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            ServerCertificate(chain, key).context()
    with pytest.raises(ConfigError, match=r"expired on 20.*: renew it"):
        made(tmp_path / "old", -timedelta(days=1)).context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(clock.VARIABLE, str(-(2**31)))
        with pytest.raises(ConfigError, match="is not valid before"):
            good.context()
    private = load_pem_private_key(good.key.read_bytes(), None)
    encrypted = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    good.key.write_bytes(encrypted)
    with pytest.raises(ConfigError, match="is encrypted"):
        good.context()


@in_session
async def test_a_certificate_is_loaded_when_it_becomes_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = RenewedCertificate(made(tmp_path / "tls"), every=0.02)
    watching, first = asyncio.create_task(certificate.watch()), certificate.context
    monkeypatch.setenv(clock.VARIABLE, str(-(2**31)))
    renewed = made(tmp_path / "tls", timedelta(days=40_000))
    await until(lambda: "is not valid before" in caplog.text)
    monkeypatch.delenv(clock.VARIABLE)
    assert shown_end() < renewed.valid_until().timestamp()
    await until(lambda: certificate.context is not first)
    assert shown_end() == renewed.valid_until().timestamp()
    watching.cancel()


@in_session
async def test_a_renewed_certificate_is_loaded_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shown(address: Address) -> str:
        return ssl.get_server_certificate(address)

    files, connections = made(tmp_path / "tls"), ClientConnections(30.0, 30.0)
    certificate = RenewedCertificate(files, every=0.02)
    async with AsyncExitStack() as stack:
        address = address_of(await serve(silent, stack, connections, certificate))
        watching = asyncio.create_task(certificate.watch())
        first = await asyncio.to_thread(shown, address)
        assert first.strip() == files.chain.read_text().strip()
        made(tmp_path / "tls")
        await until(lambda: "loaded the new certificate" in caplog.text)
        second = await asyncio.to_thread(shown, address)
        assert second.strip() == files.chain.read_text().strip() != first.strip()
        files.key.write_text("broken")
        await until(lambda: "keeping the previous one" in caplog.text)
        assert await asyncio.to_thread(shown, address) == second
        made(tmp_path / "tls")
        await until(lambda: caplog.text.count("loaded the new certificate, valid") == 2)
        assert await asyncio.to_thread(shown, address) not in (first, second)
        assert caplog.text.count("keeping the previous one") == 1
        watching.cancel()
