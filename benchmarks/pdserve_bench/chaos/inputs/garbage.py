"""Send malformed messages to every port of every process, every NATS subject and every kind of key in etcd. The graph
must keep serving and must not flood its logs."""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pdserve.contract.messages import Cancel, Hello, encode
from pdserve.contract.records import Instance, Role
from pdserve.queue.jetstream.client import short_connection
from pdserve.queue.jetstream.stream import QueueNames
from pdserve.registry import keys
from pdserve.stream.tcp import GREETING
from pdserve_bench.chaos.scene import Fault, Scene

MAX_LOG_LINES = 2000
LOOPBACK = ("127.", "::1")
EVERYWHERE = ("0.0.0.0", "::")
_HANDSHAKE = 2.0
"""Seconds to wait for a ZeroMQ peer's handshake (long, because machines may be busy)."""
_TIMEOUT = 0.3


def payloads(seed: int) -> list[bytes]:
    """Return messages that no receiver expects: noise, truncated messages, other protocols, huge lengths."""
    dice = random.Random(seed)
    whole = encode(Hello("0.0.0"))
    return [
        dice.randbytes(64),
        dice.randbytes(5000),
        whole[: len(whole) // 2],
        encode(Cancel(["nobody"])),
        encode({"type": "Submit", "request_id": 7, "prompt": "x"}),
        encode([1, None, {"a": b"\x00"}]),
        b"\xdd\xff\xff\xff\xff",  # in msgpack, this announces an array of 4 billion
        b"\xff" * 16,
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{",
        b'{"model": ',
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + dice.randbytes(40),
    ]


async def spread(scene: Scene) -> float | None:
    logs = scene.running.state_dir / "logs"
    quiet = await _lines_per_second(logs)
    before, began = _lines(logs), time.monotonic()
    ports = list(_listening(scene.running.family()))
    everything = payloads(scene.options.seed)
    await asyncio.gather(*(asyncio.to_thread(_to_port, host, port, everything) for host, port, _ in ports))
    graph = scene.running.graph
    subjects = subjects_of(graph.namespace, graph.model, await scene.watch.instances(Role.DECODE))
    credentials = graph.load_credentials()
    tls = credentials.client_context() if credentials else None
    async with short_connection(graph.nats, tls) as client:
        for subject in subjects:
            for payload in everything:
                await client.publish(subject, payload)
        await client.flush()
    names = await _to_etcd(scene, everything)
    scene.say(f"garbage to {len(ports)} ports, {len(subjects)} subjects, {len(names)} keys")
    await asyncio.sleep(scene.options.hold / 2)
    for name in names:
        await scene.watch.registry.delete(name)
    recovered = await scene.recovery()
    lines = _lines(logs) - before - quiet * (time.monotonic() - began)
    scene.say(f"about {max(0, lines):.0f} log lines because of the garbage")
    if lines > MAX_LOG_LINES:
        scene.amiss.append(f"about {lines:.0f} log lines because of the garbage, more than {MAX_LOG_LINES}")
    if dead := [f"{port} of {owner}" for host, port, owner in ports if not _connects(host, port)]:
        scene.amiss.append(f"nothing listens any more on {', '.join(dead)}")
    return recovered


def _listening(processes: Sequence[psutil.Process]) -> Iterator[tuple[str, int, str]]:
    """Return address, port and owner of each listening socket on loopback."""
    seen: set[tuple[str, int]] = set()
    for process in processes:
        with suppress(psutil.Error):
            for listener in process.net_connections("tcp"):
                host = "127.0.0.1" if listener.laddr.ip in EVERYWHERE else listener.laddr.ip
                if listener.status != psutil.CONN_LISTEN or not host.startswith(LOOPBACK):
                    continue
                if (host, listener.laddr.port) not in seen:
                    seen.add((host, listener.laddr.port))
                    yield host, listener.laddr.port, f"process {process.pid} ({process.name()})"


def _to_port(host: str, port: int, everything: Sequence[bytes]) -> None:
    """Send each payload raw on its own connection, then all as a ZeroMQ peer (for vLLM's side channel) and as a
    frontend."""
    for payload in everything:
        _send(host, port, lambda end, raw=payload: end.sendall(raw))  # type: ignore[misc]
    _send(host, port, lambda end: _as_zeromq(end, [[payload] for payload in everything]))
    _send(host, port, lambda end: _as_zeromq(end, [[b"", payload] for payload in everything]))
    _send(
        host, port, lambda end: _as_zeromq(end, [[payload, payload, b"", payload] for payload in everything])
    )
    _send(
        host, port, lambda end: _as_zeromq(end, [], b"\x02" + b"\x7f" + b"\xff" * 7)
    )  # this announces a frame of 2^63 - 1 bytes
    _as_frontend(host, port, everything)


def _as_frontend(host: str, port: int, everything: Sequence[bytes]) -> None:
    """Speak the stream's protocol wrongly: half a greeting, a wrong version, a frame length of 2^32-1, and after a good
    greeting all payloads and a broken frame."""
    greeting = _framed(GREETING + b" garbage")
    endless = b"\xff" * 4
    for raw in (greeting[: len(greeting) // 2], _framed(b"pdserve-stream/0 garbage"), endless):
        _send(host, port, lambda end, raw=raw: end.sendall(raw))  # type: ignore[misc]
    for last in (endless, _framed(everything[1])[:-1]):
        messages = b"".join(map(_framed, everything)) + last
        _send(host, port, lambda end, raw=greeting + messages: end.sendall(raw))  # type: ignore[misc]
    _send(host, port, lambda end: _slowly(end, greeting))


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _slowly(end: socket.socket, data: bytes) -> None:
    for byte in data[: len(data) // 2]:
        end.sendall(bytes([byte]))
        time.sleep(_TIMEOUT / 5)


def _send(host: str, port: int, how: Callable[[socket.socket], object]) -> None:
    """Connect, send, and wait until the peer is silent, because closing at once would drop unread data."""
    with suppress(OSError), socket.create_connection((host, port), timeout=_TIMEOUT) as end:
        how(end)
        with suppress(TimeoutError):
            while end.recv(1000):
                pass


def _as_zeromq(end: socket.socket, messages: Sequence[Sequence[bytes]], more: bytes = b"") -> None:
    """Send messages after the handshake of ZMTP 3.0 (rfc.zeromq.org/spec/23). Wait for the peer's READY first: if it
    came after our close, the connection would be reset and our messages dropped."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    end.settimeout(_HANDSHAKE)
    end.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    answer = b""
    while b"READY" not in answer:
        some = end.recv(256)
        answer += some
        if not some or not answer.startswith(b"\xff") or len(answer) > 1000:
            return
    end.settimeout(_TIMEOUT)
    for parts in messages:
        for number, part in enumerate(parts, 1):
            flags = (number < len(parts)) | (2 if len(part) > 255 else 0)
            length = len(part).to_bytes(8 if flags & 2 else 1, "big")
            end.sendall(bytes([flags]) + length + part)
    end.sendall(more)


def _connects(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def subjects_of(namespace: str, model: str, workers: Iterable[Instance]) -> list[str]:
    """Return the subjects that these decode workers and their prefill workers subscribe to."""
    queues = {worker.id: QueueNames(namespace, model, worker.fingerprint) for worker in workers}
    shared = {
        subject for names in queues.values() for subject in (names.requests, names.state, names.notices)
    }
    return [*sorted(shared), *(names.answers(worker) for worker, names in queues.items())]


async def _to_etcd(scene: Scene, everything: Sequence[bytes]) -> list[str]:
    """Write garbage to new instance and card keys and to the keys of settings. Return all these keys."""
    model = scene.running.graph.model
    prefixes = [f"{keys.INSTANCES}{role}/garbage-" for role in (*Role, "nobody")]
    prefixes += [f"{keys.CARDS}{model}/garbage-", keys.CARDS + "garbage-", keys.INSTANCES + "garbage-"]
    names = [f"{prefix}{number}" for prefix in prefixes for number in range(len(everything))]
    names += [
        f"{keys.SETTINGS}{name}"
        for name in ("max-local-prefill-length", "max-prefill-queue-size", "router", "x")
    ]
    for number, name in enumerate(names):
        await scene.watch.registry.put(name, everything[number % len(everything)], leased=False)
    return names


def _lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.log*"))


async def _lines_per_second(folder: Path) -> float:
    """Measure the log lines that the load causes without garbage."""
    before, began = _lines(folder), time.monotonic()
    await asyncio.sleep(2)
    return (_lines(folder) - before) / (time.monotonic() - began)


GARBAGE = Fault(
    "garbage", "malformed messages to every port, every subject on NATS, every kind of key in etcd", spread
)
