"""Both ends of NIXL's side channel, on which a decode engine asks a prefill engine how to reach its memory.

vLLM's listener ends its thread at the first message that it cannot read, such as a port scan: no new decode engine can
then read KV from that prefill engine, and each attempt waits for 5 s. This listener speaks the same protocol and drops
such messages. And a prefill worker asks its own listener now and then (`ask`), since nothing else shows whether it can
be reached: health and queue do not depend on it.

With the answer a peer can read and write all KV of the engine. ZeroMQ does not speak TLS: if the graph has credentials,
both ends use ZeroMQ's CURVE instead, with one pair of keys that only processes of the graph can derive. The server
answers no peer that does not know its public key, and that key is never sent.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pdserve.credentials import Credentials
from pdserve.kv import CREDENTIALS

GET_META = b"get_meta_msg"
"""vLLM's name of the request"""
_POLL_MS = 1000
"""milliseconds between two looks at `stop`"""
_RESTART_DELAY = 0.5
"""seconds"""
_MAX_MESSAGE = 4 << 10
"""bytes; a request has about 20"""
_request = msgspec.msgpack.Decoder(tuple[bytes, int, int])


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
                _serve(socket, answers, stop, log)
        except Exception:
            log.exception("the KV side channel at %s failed and starts again", path)
            stop.wait(_RESTART_DELAY)


def _serve(
    socket: "zmq.Socket[bytes]", answers: Mapping[tuple[int, int], bytes], stop: Event, log: Logger
) -> None:
    while not stop.is_set():
        try:
            parts = socket.recv_multipart()
        except zmq.Again:
            continue
        try:
            answer = _answer(parts, answers)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("KV side channel: a message of %d parts is dropped: %s", len(parts), error)
            continue
        # vLLM estimates its peer's clock from this: it must be read in the process that sets the blocks' expiry
        socket.send_multipart((parts[0], b"", answer, msgspec.msgpack.encode(time.perf_counter())))


def _answer(parts: list[bytes], answers: Mapping[tuple[int, int], bytes]) -> bytes:
    _, _, body = parts
    name, pipeline_rank, tensor_rank = _request.decode(body)
    if name != GET_META:
        raise ValueError(f"unknown request {name[:40]!r}")
    return answers[pipeline_rank, tensor_rank]


Dial = Callable[[int, str], AbstractContextManager["zmq.Socket[bytes]"]]


def dialer(key: CurveKey | None) -> Dial:
    """A function that opens a requesting socket, called in place of vLLM's `zmq_ctx`."""

    @contextmanager
    def dial(kind: int, path: str) -> "Iterator[zmq.Socket[bytes]]":
        with zmq.Context() as context, context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            if key is not None:
                socket.curve_publickey, socket.curve_secretkey = key.public, key.secret
                socket.curve_serverkey = key.public
            socket.connect(path)
            yield socket

    return dial


def ask(path: str, within: float, key: CurveKey | None = None) -> bytes:
    """Ask as a decode engine would, and block; return vLLM's handshake. Raises TimeoutError without an answer."""
    with dialer(key)(zmq.REQ, path) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(within * 1000))
        socket.send(msgspec.msgpack.encode((GET_META, 0, 0)))
        try:
            return socket.recv_multipart()[0]
        except zmq.Again:
            raise TimeoutError(f"the KV side channel at {path} does not answer within {within:g} s") from None
