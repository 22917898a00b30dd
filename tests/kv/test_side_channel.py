"""No message ends the side channel's listener, and vLLM's own request is answered."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.kv import side_channel
from pdserve.kv.nixl import provide_nixl
from pdserve.ports import free_port

ANSWERS = {(0, 0): b"metadata"}


@pytest.fixture(params=["ours", "as vLLM starts it"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    port, ready, stop = free_port("127.0.0.1"), threading.Event(), threading.Event()
    path = f"tcp://127.0.0.1:{port}"
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    if request.param == "ours":
        work, arguments = side_channel.listen, (ANSWERS, ready, stop, path, logging.getLogger("test"))
    else:
        provide_nixl()
        from pdserve.kv.connector import ConnectorScheduler

        work = ConnectorScheduler._nixl_handshake_listener
        arguments = (ANSWERS, ready, stop, "127.0.0.1", port)
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    assert ready.wait(5)
    yield path
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_malformed_messages_are_dropped(path: str) -> None:
    side_channel.ask(path, 2)
    garbage = [b"", b"\xc1", b"x", b"\x91" * 100_000, msgspec.msgpack.encode((side_channel.GET_META, 0, 99))]
    garbage += [msgspec.msgpack.encode(message) for message in ((b"other", 0, 0), {"a": 1}, [1], None)]
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.REQ):
            for message in garbage:
                with context.socket(kind) as peer:
                    peer.setsockopt(zmq.LINGER, 1000)
                    peer.connect(path)
                    peer.send(message)
                    if kind == zmq.DEALER:
                        peer.send_multipart([message] * 4)
    host, port = path.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
        side_channel.ask(path, 2)


def test_the_answer_is_what_vllm_reads(path: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    assert side_channel.GET_META == GET_META_MSG
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.setsockopt(zmq.RCVTIMEO, 2000)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(path)
        peer.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        metadata, clock = peer.recv_multipart()
    assert metadata == b"metadata"
    assert abs(msgspec.msgpack.decode(clock) - time.perf_counter()) < 5


def test_a_port_that_does_not_answer_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(TimeoutError, match="does not answer"):
        side_channel.ask(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", 0.2)
