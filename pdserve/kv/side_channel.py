"""Both ends of NIXL's side channel, on which a decode engine asks a prefill engine how to reach its memory.

vLLM's listener ends its thread at the first message that it cannot read, such as a port scan: no new decode engine can
then read KV from that prefill engine, and each attempt waits for 5 s. This listener speaks the same protocol and drops
such messages. And a prefill worker asks its own listener now and then (`ask`), since nothing else shows whether it can
be reached: health and queue do not depend on it.

Here decode engines also ask, after each read, whether the prefill engine held the KV until now (`leases.py`).

With the answer a peer can read and write all KV of the engine. ZeroMQ does not speak TLS: if the graph has credentials,
both ends use ZeroMQ's CURVE instead, with one pair of keys that only processes of the graph can derive. The server
answers no peer that does not know its public key, and that key is never sent.
"""

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
"""vLLM's name of the request"""
HELD = b"pdserve-held"
"""our question whether the KV of a prefill is held"""
_POLL_MS = 1000
"""milliseconds between two looks at `stop`"""
_RESTART_DELAY = 0.5
"""seconds"""
_MAX_MESSAGE = 4 << 10
"""bytes; a request has about 20"""
CONFIRM_WITHIN = 3.0
"""seconds after which an engine that does not answer counts as one that held nothing"""
WAIT_MS = 2
"""milliseconds that an engine step waits for answers; else a read would count one step later"""
_IDLE = 600.0
"""seconds after which a connection that nothing was asked on is closed"""
_confirmed = msgspec.msgpack.Decoder(tuple[int, bool])
_request = msgspec.msgpack.Decoder(tuple[bytes, int | tuple[str, str], int])


Held = Callable[[str, str], bool]
"""whether an engine holds the KV of a prefill, by their ids"""


@dataclass(frozen=True)
class CurveKey:
    public: bytes
    secret: bytes

    @classmethod
    def of(cls, credentials: Credentials | None) -> "CurveKey | None":
        """None without credentials: the channel is then not encrypted."""
        if credentials is None:
            return None
        secret = z85.encode(credentials.secret("KV side channel"))
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def configured(cls, vllm_config: Any) -> "CurveKey | None":
        """In vLLM's processes: the key by the connector's extra configuration."""
        folder = vllm_config.kv_transfer_config.get_from_extra_config(CREDENTIALS, None)
        return cls.of(Credentials(Path(folder)) if folder else None)


def listen(
    answers: Mapping[tuple[int, int], bytes],
    ready: Event,
    stop: Event,
    path: str,
    log: Logger,
    key: CurveKey | None = None,
    held: Held = lambda engine, prefill: False,
) -> None:
    """Answer until `stop`, whatever arrives. `answers`: by pipeline-parallel and tensor-parallel rank."""
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
                _serve(socket, answers, held, stop, log)
        except Exception:
            log.exception("the KV side channel at %s failed and starts again", path)
            stop.wait(_RESTART_DELAY)


def _serve(
    socket: "zmq.Socket[bytes]",
    answers: Mapping[tuple[int, int], bytes],
    held: Held,
    stop: Event,
    log: Logger,
) -> None:
    while not stop.is_set():
        try:
            parts = socket.recv_multipart()
        except zmq.Again:
            continue
        try:
            answer = _answer(parts, answers, held)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("KV side channel: a message of %d parts is dropped: %s", len(parts), error)
            continue
        # vLLM estimates its peer's clock from this: it must be read in the process that sets the blocks' expiry
        socket.send_multipart((parts[0], b"", answer, msgspec.msgpack.encode(time.perf_counter())))


def _answer(parts: list[bytes], answers: Mapping[tuple[int, int], bytes], held: Held) -> bytes:
    _, _, body = parts
    match _request.decode(body):
        case name, int(pipeline_rank), tensor_rank if name == GET_META:
            return answers[pipeline_rank, tensor_rank]
        case name, (engine, prefill), number if name == HELD:
            return msgspec.msgpack.encode((number, held(engine, prefill)))
        case name, _, _:
            raise ValueError(f"unknown request {name[:40]!r}")


Dial = Callable[[int, str], AbstractContextManager["zmq.Socket[bytes]"]]


def dialer(key: CurveKey | None) -> Dial:
    """A function that opens a requesting socket, called in place of vLLM's `zmq_ctx`."""

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
    """Ask as a decode engine would, and block; return vLLM's handshake. Raises TimeoutError without an answer."""
    with dialer(key)(zmq.REQ, path) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(within * 1000))
        socket.send(msgspec.msgpack.encode((GET_META, 0, 0)))
        try:
            return socket.recv_multipart()[0]
        except zmq.Again:
            raise TimeoutError(f"the KV side channel at {path} does not answer within {within:g} s") from None


@dataclass(frozen=True)
class Source:
    """Where KV was read: a prefill engine and the id of the prefill in it."""

    path: str
    """of the engine's side channel"""
    engine: str
    prefill: str


@dataclass
class _Question:
    number: int
    path: str
    asked: float
    held: bool | None = None
    """the answer; None: it has not come"""


@dataclass
class _Peer:
    socket: "zmq.Socket[bytes]"
    used: float = 0.0


@dataclass
class Confirmations:
    """Asks whether KV was still held when its read had ended: a question for each read, sent after it."""

    key: CurveKey | None
    _questions: dict[str, _Question] = field(default_factory=dict)
    """by read"""
    _peers: dict[str, _Peer] = field(default_factory=dict)
    """by path"""
    _numbers: Iterator[int] = field(default_factory=count)
    _context: zmq.Context["zmq.Socket[bytes]"] = field(default_factory=zmq.Context)

    def update(self, ended: Mapping[str, Source]) -> tuple[set[str], set[str]]:
        """Take the reads that have ended and are not confirmed yet. Return those whose KV was held, and those whose KV
        was not, or whose engine does not answer. A read is asked about once, and forgotten when it is left out."""
        for gone in self._questions.keys() - ended.keys():
            del self._questions[gone]
        if not ended:
            return set(), set()
        fresh = [read for read in ended if read not in self._questions]
        for read in fresh:
            self._questions[read] = self._ask(ended[read])
        self._receive({ended[read].path for read in ended}, WAIT_MS if fresh else 0)
        self._give_up(time.monotonic())
        held, lost = set[str](), set[str]()
        for read, question in self._questions.items():
            if question.held is not None:
                (held if question.held else lost).add(read)
        for read in held | lost:
            del self._questions[read]
        return held, lost

    def __contains__(self, read: str) -> bool:
        return read in self._questions

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _give_up(self, now: float) -> None:
        """Count late answers as "not held", and connect anew for the next question."""
        for question in self._questions.values():
            if question.held is None and now > question.asked + CONFIRM_WITHIN:
                question.held = False
                if peer := self._peers.pop(question.path, None):
                    peer.socket.close()

    def _ask(self, source: Source) -> _Question:
        question = _Question(next(self._numbers), source.path, time.monotonic())
        peer = self._peer(source.path, question.asked)
        message = HELD, (source.engine, source.prefill), question.number
        with suppress(zmq.Again):  # an engine that is gone: it does not answer
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
        """Read the answers that are there, and wait for the others."""
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
            number, held = _confirmed.decode(parts[1])
        except (msgspec.MsgspecError, IndexError):
            return  # of another build
        for question in self._questions.values():
            if question.number == number:
                question.held = held
