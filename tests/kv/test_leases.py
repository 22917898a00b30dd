"""The prefill engine decides whether KV was still held; the decode engine's clock does not count."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from pdserve.kv import side_channel
from pdserve.kv.leases import REMEMBERED, Leases
from pdserve.kv.side_channel import Confirmations, CurveKey, Source
from tests.conditions import until
from tests.kv.test_side_channel import running


def test_kv_is_held_from_the_prompts_arrival_to_the_end_of_its_lease() -> None:
    leases = Leases()
    assert not leases.is_held("p")
    leases.begin("p")
    assert leases.is_held("p")
    leases.end("p", read=False)
    assert not leases.is_held("p")
    leases.end("p", read=True)
    assert not leases.is_held("p"), "a rank reported its read after another rank reported the lease's end"


def test_the_latest_kv_that_was_read_still_counts_as_held() -> None:
    leases = Leases()
    for number in range(REMEMBERED + 1):
        leases.begin(f"p{number}")
        leases.end(f"p{number}", read=True)
    assert leases.is_held(f"p{REMEMBERED}")
    assert not leases.is_held("p0")


@pytest.fixture
def leases() -> Leases:
    leases = Leases()
    leases.begin("p")
    return leases


@contextmanager
def engine(leases: Leases, key: CurveKey | None, name: str = "prefill-0-a") -> Iterator[str]:
    def listen(ready: threading.Event, stop: threading.Event, port: int) -> None:
        def held(engine: str, prefill: str) -> bool:
            return engine == name and leases.is_held(prefill)

        path = f"tcp://127.0.0.1:{port}"
        side_channel.listen({}, ready, stop, path, logging.getLogger("test"), key, held)

    with running(listen) as path:
        yield path


@contextmanager
def asking(key: CurveKey | None) -> Iterator[Confirmations]:
    asking = Confirmations(key)
    yield asking
    asking.close()


async def outcome(confirmations: Confirmations, ended: dict[str, Source]) -> dict[str, bool]:
    """Return the result of each read as engine steps would learn it."""
    found: dict[str, bool] = {}

    def update() -> bool:
        held, lost = confirmations.update({read: ended[read] for read in ended if read not in found})
        found.update(dict.fromkeys(held, True) | dict.fromkeys(lost, False))
        return len(found) == len(ended)

    await until(update)
    return found


async def test_each_read_is_confirmed_by_the_engine_that_was_read(
    leases: Leases, key: CurveKey | None
) -> None:
    with engine(leases, key) as path, asking(key) as confirmations:
        ended = {
            "good": Source(path, "prefill-0-a", "p"),
            "unknown": Source(path, "prefill-0-a", "q"),
            "of an earlier boot": Source(path, "prefill-0-0", "p"),
        }
        found = await outcome(confirmations, ended)
        assert found == {"good": True, "unknown": False, "of an earlier boot": False}
        assert "good" not in confirmations


async def test_an_answer_does_not_confirm_a_later_read(leases: Leases, key: CurveKey | None) -> None:
    """The later read has the same prefill and name, as if its request had been cancelled and sent again."""
    with engine(leases, key) as path, asking(key) as confirmations:
        ended = {"r": Source(path, "prefill-0-a", "p")}
        assert await outcome(confirmations, ended) == {"r": True}
        confirmations._ask(ended["r"])  # asked, but no read waits for the answer
        leases.end("p", read=False)
        assert await outcome(confirmations, ended) == {"r": False}


async def test_an_engine_that_is_unreachable_or_never_answers_confirms_nothing(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "CONFIRM_WITHIN", 0.3)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute, asking(None) as confirmations:
        mute.setsockopt(zmq.LINGER, 0)
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        closed = "tcp://127.0.0.1:1"
        ended = {"mute": Source(f"tcp://127.0.0.1:{port}", "p", "p"), "closed": Source(closed, "p", "p")}
        assert await outcome(confirmations, ended) == {"mute": False, "closed": False}
        assert not confirmations._peers, "the next question gets a new connection"


async def test_unreadable_answers_confirm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "CONFIRM_WITHIN", 0.3)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other, asking(None) as confirmations:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        ended = {"r": Source(f"tcp://127.0.0.1:{port}", "p", "p")}
        assert confirmations.update(ended) == (set(), set())
        sender, _, asked = other.recv_multipart()
        _, _, number = msgspec.msgpack.decode(asked)
        for answer in ([], [b"\xc1"], [msgspec.msgpack.encode((number + 1, True))], [b""]):
            other.send_multipart([sender, b"", *answer])
        assert await outcome(confirmations, ended) == {"r": False}
