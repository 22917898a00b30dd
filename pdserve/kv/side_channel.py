"""The side channel of a prefill engine (ZeroMQ): decode engines ask it how to reach the engine's memory, and whether it
still held a prompt's KV after they read it (`leases.py`).

Listener and client speak vLLM's protocol. vLLM's own listener ends at the first message that it cannot read, such as a
port scan, and from then on no new decode engine can read KV there. This listener drops such messages. A prefill worker
also asks its own listener regularly (`ask`), because only an answer shows that it can be reached.

The handshake's answer lets a peer read and write all KV of the engine. So a graph with credentials uses ZeroMQ's CURVE:
both ends derive the same key pair from the credentials, and the listener answers only peers that know the public key,
which is never sent."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from logging import Logger
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pdserve.kv import CREDENTIALS
from pdserve.security.credentials import Credentials

GET_META = b"get_meta_msg"
"""vLLM's request for a handshake."""
HELD = b"pdserve-held"
"""pdserve's question whether the KV of a prefill is held."""
_POLL_MS = 1000
"""Milliseconds between two checks of `stop`."""
_RESTART_DELAY = 0.5
"""Seconds from a failure of the listener to its restart."""
_MAX_MESSAGE = 4 << 10
"""Bytes; a request has about 20."""
CONFIRM_WITHIN = 3.0
"""Seconds after which an engine that does not answer counts as one that held nothing."""
WAIT_MS = 2
"""Milliseconds that an engine step waits for answers, so that a read need not wait for the next step."""
_IDLE = 600.0
"""Seconds after which an unused connection is closed."""
_held_decoder = msgspec.msgpack.Decoder(tuple[int, bool])
_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, int | tuple[str, str], int])

IsHeld = Callable[[str, str], bool]
"""Takes the ids of an engine and a prefill; returns whether the engine holds the prefill's KV."""


@dataclass(frozen=True)
class CurveKey:
    public: bytes
    secret: bytes

    @classmethod
    def of(cls, credentials: Credentials | None) -> "CurveKey | None":
        """None without credentials; then the channel is not encrypted."""
        if credentials is None:
            return None
        secret = z85.encode(credentials.secret("KV side channel"))
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def configured(cls, vllm_config: Any) -> "CurveKey | None":
        """The key that the connector's extra configuration names."""
        folder = vllm_config.kv_transfer_config.get_from_extra_config(CREDENTIALS, None)
        return cls.of(Credentials(Path(folder)) if folder else None)


def listen(
    answers: Mapping[tuple[int, int], bytes],
    ready: Event,
    stop: Event,
    path: str,
    log: Logger,
    key: CurveKey | None = None,
    is_held: IsHeld = lambda engine, prefill: False,
) -> None:
    """Answer until `stop`, whatever arrives. `answers`: handshakes by pipeline-parallel and tensor-parallel rank."""
    while not stop.is_set():
        try:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, _POLL_MS)
                socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
                if key is not None:
                    socket.curve_server = True
                    socket.curve_secretkey = key.secret
                socket.bind(path)
                ready.set()
                _serve(socket, answers, is_held, stop, log)
        except Exception:
            log.exception("KV side channel: the listener at %s failed; restarting it", path)
            stop.wait(_RESTART_DELAY)


def _serve(
    socket: "zmq.Socket[bytes]",
    answers: Mapping[tuple[int, int], bytes],
    is_held: IsHeld,
    stop: Event,
    log: Logger,
) -> None:
    while not stop.is_set():
        try:
            parts = socket.recv_multipart()
        except zmq.Again:
            continue
        try:
            answer = _answer(parts, answers, is_held)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("KV side channel: dropped an unreadable message of %d parts: %s", len(parts), error)
            continue
        # vLLM estimates its peer's clock from this time, so it must be read in the process that sets the blocks' expiry
        socket.send_multipart((parts[0], b"", answer, msgspec.msgpack.encode(time.perf_counter())))


def _answer(parts: list[bytes], answers: Mapping[tuple[int, int], bytes], is_held: IsHeld) -> bytes:
    _, _, body = parts
    match _request_decoder.decode(body):
        case name, int(pipeline_rank), tensor_rank if name == GET_META:
            return answers[pipeline_rank, tensor_rank]
        case name, (engine, prefill), number if name == HELD:
            return msgspec.msgpack.encode((number, is_held(engine, prefill)))
        case name, _, _:
            raise ValueError(f"unknown request {name[:40]!r}")


Dial = Callable[[int, str], AbstractContextManager["zmq.Socket[bytes]"]]


def dialer(key: CurveKey | None) -> Dial:
    """Return a function that opens a client socket, to replace vLLM's `zmq_ctx`."""

    @contextmanager
    def dial(kind: int, path: str) -> "Iterator[zmq.Socket[bytes]]":
        with zmq.Context() as context, _dialed(context, kind, path, key) as socket:
            yield socket

    return dial


def _dialed(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, path: str, key: CurveKey | None
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    if key is not None:
        socket.curve_publickey, socket.curve_secretkey = key.public, key.secret
        socket.curve_serverkey = key.public
    socket.connect(path)
    return socket


def ask(path: str, within: float, key: CurveKey | None = None) -> bytes:
    """Ask for the handshake as a decode engine does, and block. Raises TimeoutError."""
    with dialer(key)(zmq.REQ, path) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(within * 1000))
        socket.send(msgspec.msgpack.encode((GET_META, 0, 0)))
        try:
            return socket.recv_multipart()[0]
        except zmq.Again:
            raise TimeoutError(f"the KV side channel at {path} does not answer within {within:g} s") from None


@dataclass(frozen=True)
class Source:
    """A prefill whose KV was read."""

    path: str
    """ZeroMQ address of its engine's side channel."""
    engine: str
    prefill: str


@dataclass
class _Question:
    number: int
    path: str
    asked: float
    held: bool | None = None
    """The answer; None: not yet known."""


@dataclass
class _Peer:
    socket: "zmq.Socket[bytes]"
    used: float = 0.0


@dataclass
class Confirmations:
    """Asks prefill engines, after each read of KV, whether they held it until now."""

    key: CurveKey | None
    _questions: dict[str, _Question] = field(default_factory=dict)
    """By read."""
    _peers: dict[str, _Peer] = field(default_factory=dict)
    """By path."""
    _numbers: Iterator[int] = field(default_factory=count)
    _context: zmq.Context["zmq.Socket[bytes]"] = field(default_factory=zmq.Context)

    def update(self, ended: Mapping[str, Source]) -> tuple[set[str], set[str]]:
        """Pass all ended reads that are not confirmed yet. Return two sets: reads whose KV was held, and reads whose KV
        was not held or whose engine does not answer. A read is asked about once, and forgotten if `ended` lacks it."""
        for gone in self._questions.keys() - ended.keys():
            del self._questions[gone]
        if not ended:
            return set(), set()
        fresh = [read for read in ended if read not in self._questions]
        for read in fresh:
            self._questions[read] = self._ask(ended[read])
        self._receive({ended[read].path for read in ended}, WAIT_MS if fresh else 0)
        self._give_up(time.monotonic())
        held = {read for read, question in self._questions.items() if question.held}
        lost = {read for read, question in self._questions.items() if question.held is False}
        for read in held | lost:
            del self._questions[read]
        return held, lost

    def __contains__(self, read: str) -> bool:
        return read in self._questions

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _give_up(self, now: float) -> None:
        """Count a question that was not answered in time as "not held". The next question uses a new connection."""
        for question in self._questions.values():
            if question.held is None and now > question.asked + CONFIRM_WITHIN:
                question.held = False
                if peer := self._peers.pop(question.path, None):
                    peer.socket.close()

    def _ask(self, source: Source) -> _Question:
        question = _Question(next(self._numbers), source.path, time.monotonic())
        peer = self._peer(source.path, question.asked)
        message = HELD, (source.engine, source.prefill), question.number
        with suppress(zmq.Again):  # the engine has ended and will not answer
            peer.socket.send_multipart([b"", msgspec.msgpack.encode(message)], zmq.NOBLOCK)
        return question

    def _peer(self, path: str, now: float) -> _Peer:
        for idle in [other for other, peer in self._peers.items() if now > peer.used + _IDLE]:
            self._peers.pop(idle).socket.close()
        if path not in self._peers:
            self._peers[path] = _Peer(_dialed(self._context, zmq.DEALER, path, self.key))
        self._peers[path].used = now
        return self._peers[path]

    def _receive(self, paths: Iterable[str], wait_ms: int) -> None:
        """Read all answers that have arrived; wait up to `wait_ms` for the missing ones."""
        sockets = [self._peers[path].socket for path in paths if path in self._peers]
        ends = time.monotonic() + wait_ms / 1000
        while True:
            for socket in sockets:
                with suppress(zmq.Again):
                    while True:
                        self._answered(socket.recv_multipart(zmq.NOBLOCK))
            left = ends - time.monotonic()
            if left <= 0 or all(question.held is not None for question in self._questions.values()):
                return
            poller = zmq.Poller()
            for socket in sockets:
                poller.register(socket, zmq.POLLIN)
            poller.poll(max(1, int(left * 1000)))

    def _answered(self, parts: list[bytes]) -> None:
        try:
            number, held = _held_decoder.decode(parts[1])
        except (msgspec.MsgspecError, IndexError):
            return  # an answer of another pdserve version
        for question in self._questions.values():
            if question.number == number:
                question.held = held
