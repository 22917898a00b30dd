"""TLS at the edge: the same guarantees as without it, on real sockets, and the certificate's own life."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from starlette.types import Receive, Scope, Send

from pdserve.certificate import ServerCertificate
from pdserve.credentials import create
from pdserve.errors import ConfigError
from pdserve.frontend.connections import ClientConnections
from pdserve.frontend.renewal import RenewedCertificate
from pdserve.frontend.server import QuietServer, http_config
from pdserve.frontend.sockets import bind
from tests.conditions import until
from tests.frontend.conftest import Graph, on_uvloop, serve
from tests.frontend.test_generate import completion
from tests.frontend.test_overload import NAME, PLACES, worker
from tests.frontend.test_sockets import HEAD

Address = tuple[str, int]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ServerCertificate:
    made = create(tmp_path_factory.mktemp("tls") / "own")
    return ServerCertificate(made.certificate, made.key)


def trusting(files: ServerCertificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.chain.with_name("ca.pem"))


@asynccontextmanager
async def server(
    graph: Graph, files: ServerCertificate, connections: ClientConnections | None = None
) -> AsyncIterator[Address]:
    async with AsyncExitStack() as stack:
        url = httpx.URL(await serve(graph.app, stack, connections, RenewedCertificate(files)))
        assert url.scheme == "https"
        assert url.port is not None
        yield url.host, url.port


@asynccontextmanager
async def client(
    address: Address, files: ServerCertificate, source: str = "127.0.0.1"
) -> AsyncIterator[ssl.SSLSocket]:
    """Blocking, so to be read in another thread; it holds next to nothing unread."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.bind((source, 0))
        sock.settimeout(30)
        sock.connect(address)
        host = address[0]
        wrapped = await asyncio.to_thread(trusting(files).wrap_socket, sock, server_hostname=host)
        with wrapped:
            yield wrapped


def ask(sock: ssl.SSLSocket, **changes: object) -> None:
    body = json.dumps(completion(**{"model": NAME, "stream": True, **changes})).encode()
    sock.sendall(HEAD % len(body) + body)


def read(sock: ssl.SSLSocket) -> bytes:
    answer = b""
    while b"[DONE]" not in answer:
        part = sock.recv(1 << 16)
        assert part, "the connection was closed"
        answer += part
    return answer


@on_uvloop
async def test_what_is_agreed_on(edge: Graph, files: ServerCertificate) -> None:
    async with edge.worker(), server(edge, files) as address:
        url = f"https://{address[0]}:{address[1]}"
        async with httpx.AsyncClient(base_url=url, verify=trusting(files)) as http:
            answer = await http.post("/v1/completions", json=completion())
            streamed = await http.post("/v1/completions", json=completion(stream=True))
        assert answer.status_code == 200
        assert b"[DONE]" in streamed.content

        def agreed(newest: ssl.TLSVersion) -> tuple[str | None, str | None]:
            context = trusting(files)
            context.maximum_version = newest
            context.set_alpn_protocols(["h2", "http/1.1"])
            with (
                socket.create_connection(address) as sock,
                context.wrap_socket(sock, server_hostname="localhost") as tls,
            ):
                return tls.version(), tls.selected_alpn_protocol()

        assert await asyncio.to_thread(agreed, ssl.TLSVersion.TLSv1_3) == ("TLSv1.3", "http/1.1")
        assert await asyncio.to_thread(agreed, ssl.TLSVersion.TLSv1_2) == ("TLSv1.2", "http/1.1")


@on_uvloop
async def test_old_versions_are_refused(edge: Graph, files: ServerCertificate) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with server(edge, files) as address:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*address, ssl=context)


@on_uvloop
async def test_unread_streams_end_and_free_everything(edge: Graph, files: ServerCertificate) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(worker(edge))
        address = await stack.enter_async_context(server(edge, files, ClientConnections(30.0, 0.4)))
        admission = edge.models.find(NAME).admission
        for _ in range(6):
            unread = await stack.enter_async_context(client(address, files))
            ask(unread, max_tokens=3500)
        await until(lambda: len(admission) == 6 - PLACES, within=10)
        async with client(address, files, "127.0.0.2") as other:
            ask(other, max_tokens=2)
            await asyncio.to_thread(read, other)
        await until(lambda: not len(admission) and not engine.usage.running, within=20)
        assert await engine.all_blocks_free()
        await until(lambda: not admission.queue.running)


@on_uvloop
async def test_unread_streams_make_way_and_go_on(edge: Graph, files: ServerCertificate) -> None:
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(edge.worker(at_once=4, pace=0.001))
        connections = ClientConnections(60.0, 60.0, pause_after=0.2)
        address = await stack.enter_async_context(server(edge, files, connections))
        await until(lambda: bool(edge.models.live().get("demo")))
        unread = []
        for _ in range(6):
            unread.append(await stack.enter_async_context(client(address, files)))
            ask(unread[-1], model="demo", max_tokens=3000, stream_options={"include_usage": True})
        await decode.until(lambda: len(decode.jobs) == PLACES)
        async with client(address, files, "127.0.0.2") as other:
            ask(other, model="demo", max_tokens=2)
            await asyncio.to_thread(read, other)
        assert decode.cancelled
        for sock in unread[1:]:
            sock.close()  # without a goodbye
        assert b'"completion_tokens":3000' in await asyncio.to_thread(read, unread[0])
        admission = edge.models.find("demo").admission
        await until(lambda: not admission.queue.running)


@on_uvloop
async def test_a_slow_reader_that_moves_is_served_to_the_end(edge: Graph, files: ServerCertificate) -> None:
    """Also of what is left when the server has closed: its goodbye waits behind it."""

    def slowly(sock: ssl.SSLSocket) -> bytes:
        answer, slow = b"", time.monotonic() + 2
        while part := sock.recv(4096):
            answer += part
            if time.monotonic() < slow:
                time.sleep(0.02)
        return answer

    connections = ClientConnections(30.0, 1.0)
    async with edge.worker(), server(edge, files, connections) as address, client(address, files) as sock:
        body = json.dumps(completion(stream=True, max_tokens=2000, logprobs=5)).encode()
        head = HEAD % len(body)
        sock.sendall(head.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost", 1) + body)
        answer = await asyncio.to_thread(slowly, sock)
    assert b"[DONE]" in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert len(answer) > 150_000
    await until(lambda: not connections.open)


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01"])
@on_uvloop
async def test_a_handshake_that_does_not_end_ends_the_connection(
    edge: Graph, files: ServerCertificate, hello: bytes
) -> None:
    connections = ClientConnections(0.4, 30.0, most_per_client=1)
    async with server(edge, files, connections) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(hello)
        started = time.monotonic()
        await until(lambda: bool(connections._of_origin))
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                assert not await reader.read()
        assert time.monotonic() - started > 0.3
        await until(lambda: not connections._of_origin)
        writer.close()


@on_uvloop
async def test_a_head_that_does_not_end_ends_the_connection(edge: Graph, files: ServerCertificate) -> None:
    connections = ClientConnections(0.4, 30.0)
    async with server(edge, files, connections) as address:
        reader, writer = await asyncio.open_connection(*address, ssl=trusting(files))
        writer.write(b"GET /version HTTP/1.1\r\nhost")
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()
        await until(lambda: not connections.open)


@on_uvloop
async def test_a_client_that_never_says_goodbye_is_left(edge: Graph, files: ServerCertificate) -> None:
    connections = ClientConnections(30.0, 4.0, pause_after=0.2)
    async with server(edge, files, connections) as address, client(address, files) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await until(lambda: bool(connections.open))
        await until(lambda: not connections.open, within=5)
        assert b"vllm" in sock.recv(4096) + sock.recv(4096)


@pytest.mark.parametrize("way", ["goodbye", "half-close", "vanish"])
@on_uvloop
async def test_a_client_that_leaves_ends_its_request(edge: Graph, files: ServerCertificate, way: str) -> None:
    async with edge.worker(pace=None) as decode, server(edge, files) as address:
        await until(lambda: bool(edge.models.live().get("demo")))
        async with client(address, files) as sock:
            ask(sock, model="demo")
            await decode.until(lambda: decode.jobs)
            if way == "goodbye":
                with suppress(TimeoutError, OSError):
                    sock.settimeout(0.1)
                    sock.unwrap()
            elif way == "half-close":
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.close()
            await decode.until(lambda: not decode.jobs)


@on_uvloop
async def test_plain_http_is_told_so_and_logged_once(
    edge: Graph, files: ServerCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    connections = ClientConnections(30.0, 30.0)
    async with server(edge, files, connections) as address:
        for _ in range(2):
            answer = await httpx.AsyncClient().get(f"http://{address[0]}:{address[1]}/health")
            assert (answer.status_code, answer.text) == (400, "This port speaks https.\n")
        await until(lambda: not connections._of_origin)
    assert caplog.text.count("does not speak TLS") == 1


@on_uvloop
async def test_what_is_on_its_way_when_it_stops_is_answered(files: ServerCertificate) -> None:
    """A connection that the kernel has made, one that is open, one with a request at work."""
    working, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        working.set()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    connections = ClientConnections(30.0, 30.0)
    with bind("127.0.0.1", 0) as sock:
        http = QuietServer(http_config(app, connections, 5.0), connections, RenewedCertificate(files))
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        await until(lambda: http.started)
        address = sock.getsockname()
        at_work = asyncio.create_task(get(*await asyncio.open_connection(*address, ssl=trusting(files))))
        await working.wait()
        idle = await asyncio.open_connection(*address, ssl=trusting(files))
        fresh = socket.create_connection(address)
        connections.draining = http.should_exit = True
        await until(lambda: sock.fileno() < 0)
        late = await asyncio.open_connection(sock=fresh, ssl=trusting(files), server_hostname="localhost")
        asking = [asyncio.create_task(get(*each)) for each in (idle, late)]
        await asyncio.sleep(0)
        release.set()
        for answer in await asyncio.gather(at_work, *asking):
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"ok")
        await asyncio.wait_for(serving, 5)


# the certificate


def made(folder: Path, *, days: float = 30, start: float = -1, passphrase: bytes = b"") -> ServerCertificate:
    folder.mkdir(exist_ok=True)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + timedelta(days=start))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    how = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    files = ServerCertificate(folder / "cert.pem", folder / "key.pem")
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    files.chain.write_bytes(certificate.public_bytes(Encoding.PEM))
    return files


def test_wrong_files_are_told_with_what_to_do(tmp_path: Path) -> None:
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
        made(tmp_path / "old", days=-0.5).context()
    with pytest.raises(ConfigError, match="is not valid before"):
        made(tmp_path / "new", start=1).context()
    with pytest.raises(ConfigError, match="is encrypted"):
        made(tmp_path / "secret", passphrase=b"secret").context()


@on_uvloop
async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    def shown(address: Address) -> str:
        return ssl.get_server_certificate(address)

    files, connections = made(tmp_path / "tls"), ClientConnections(30.0, 30.0)
    certificate = RenewedCertificate(files, every=0.02)
    async with AsyncExitStack() as stack:
        url = httpx.URL(await serve(app, stack, connections, certificate))
        assert url.port is not None
        address, watching = (url.host, url.port), asyncio.create_task(certificate.watch())
        first = await asyncio.to_thread(shown, address)
        assert first.strip() == files.chain.read_text().strip()
        made(tmp_path / "tls")
        await until(lambda: "a new certificate" in caplog.text)
        second = await asyncio.to_thread(shown, address)
        assert second.strip() == files.chain.read_text().strip() != first.strip()
        files.key.write_text("broken")
        await until(lambda: "the one before stays" in caplog.text)
        assert await asyncio.to_thread(shown, address) == second
        made(tmp_path / "tls")
        await until(lambda: caplog.text.count("a new certificate, valid") == 2)
        assert await asyncio.to_thread(shown, address) not in (first, second)
        assert caplog.text.count("the one before stays") == 1
        watching.cancel()
