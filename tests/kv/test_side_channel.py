"""No message ends the side channel's listener, and vLLM's own request is answered."""

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.kv import side_channel
from pdserve.kv.side_channel import CurveKey
from pdserve.security.credentials import Credentials, create
from pdserve.util.net import free_port

ANSWERS = {(0, 0): b"metadata"}
WITHIN = 30.0
"""maximum of seconds for an answer, on a busy machine"""
REFUSED_AFTER = 0.3
"""seconds after which a missing answer counts as a refusal"""


@contextmanager
def running(listen: Callable[[threading.Event, threading.Event, int], None]) -> Iterator[str]:
    """Run `listen(ready, stop, port)` in a thread; yield its address."""
    port, ready, stop = free_port("127.0.0.1"), threading.Event(), threading.Event()
    thread = threading.Thread(target=listen, args=(ready, stop, port))
    thread.start()
    assert ready.wait(30)
    yield f"tcp://127.0.0.1:{port}"
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def listening(key: CurveKey | None) -> Iterator[str]:
    def listen(ready: threading.Event, stop: threading.Event, port: int) -> None:
        side_channel.listen(ANSWERS, ready, stop, f"tcp://127.0.0.1:{port}", logging.getLogger("test"), key)

    with running(listen) as path:
        yield path


@pytest.fixture
def path(key: CurveKey | None) -> Iterator[str]:
    with listening(key) as path:
        yield path


def test_malformed_messages_are_dropped(path: str, key: CurveKey | None) -> None:
    side_channel.ask(path, WITHIN, key)
    garbage = [b"", b"\xc1", b"x", b"\x91" * 100_000, msgspec.msgpack.encode((side_channel.GET_META, 0, 99))]
    garbage += [msgspec.msgpack.encode(message) for message in ((b"other", 0, 0), {"a": 1}, [1], None)]
    for kind in (zmq.DEALER, zmq.REQ):
        for message in garbage:
            with side_channel.dialer(key)(kind, path) as peer:
                peer.setsockopt(zmq.LINGER, 1000)
                peer.send(message)
                if kind == zmq.DEALER:
                    peer.send_multipart([message] * 4)
    host, port = path.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
        side_channel.ask(path, WITHIN, key)


def test_the_answer_is_what_vllm_reads(path: str, key: CurveKey | None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    assert side_channel.GET_META == GET_META_MSG
    before = time.perf_counter()
    with side_channel.dialer(key)(zmq.REQ, path) as peer:
        peer.setsockopt(zmq.RCVTIMEO, int(WITHIN * 1000))
        peer.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        metadata, clock = peer.recv_multipart()
    assert metadata == b"metadata"
    assert before < msgspec.msgpack.decode(clock) < time.perf_counter()


def test_a_port_that_does_not_answer_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(TimeoutError, match="does not answer"):
        side_channel.ask(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", 0.2)


def test_only_a_process_of_the_graph_is_answered(tmp_path: Path) -> None:
    """A peer without a key, of another graph, or with only a key of its own gets no answer."""
    ours, other = (CurveKey.of(create(tmp_path / name)) for name in ("ours", "other"))
    assert ours
    assert other
    public, secret = zmq.curve_keypair()
    with listening(ours) as path:
        for key in (None, other, CurveKey(public, secret)):
            with pytest.raises(TimeoutError):
                side_channel.ask(path, REFUSED_AFTER, key)
        side_channel.ask(path, WITHIN, ours)
    with listening(None) as path, pytest.raises(TimeoutError):
        side_channel.ask(path, REFUSED_AFTER, ours)


def test_the_key_depends_on_the_graphs_credentials_only(tmp_path: Path) -> None:
    """Copies of a folder have the same key; keys of other purposes differ."""
    graph = create(tmp_path / "graph")
    copied = Credentials(shutil.copytree(graph.folder, tmp_path / "copy"))
    assert CurveKey.of(copied) == CurveKey.of(graph)
    assert CurveKey.of(create(tmp_path / "other")) != CurveKey.of(graph)
    assert graph.secret("a") != graph.secret("b")
