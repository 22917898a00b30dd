"""What both implementations of the store of responses promise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from pdserve.credentials import Credentials
from pdserve.errors import PeerGone, QueueUnavailable
from pdserve.queue.jetstream import responses
from pdserve.queue.jetstream.responses import CHUNK, JetStreamResponses
from pdserve.queue.memory import MemoryBroker, MemoryResponses
from pdserve.queue.responses import ResponseStore, StoreLimits
from tests.conditions import until
from tests.queue.conftest import NatsOutage

Make = Callable[..., Awaitable[ResponseStore]]


@pytest.fixture
async def store(url: str | None, namespace: str) -> AsyncIterator[Make]:
    """Makes stores as different frontends would, and entered."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:

        async def make(age: float = 60.0, max_bytes: int = 8 << 20) -> ResponseStore:
            limits = StoreLimits(age, max_bytes)
            made: ResponseStore = (
                JetStreamResponses(url, namespace, limits)
                if url
                else MemoryResponses(broker, namespace, limits)
            )
            return await stack.enter_async_context(made)

        yield make


async def has(store: ResponseStore, owner: str, key: str) -> bool:
    try:
        await store.get(owner, key)
    except KeyError:
        return False
    return True


async def test_another_frontend_finds_it(store: Make) -> None:
    one, other = await store(), await store()
    await one.put("alice", "resp_1", b"first")
    assert await other.get("alice", "resp_1") == b"first"
    await other.put("alice", "resp_1", b"second")
    assert await one.get("alice", "resp_1") == b"second"


@pytest.mark.parametrize("key", ["resp_2", "a.b", "*", ">", "x y\n", "é" * 500, ""])
async def test_only_its_owner_finds_it(store: Make, key: str) -> None:
    """Whatever the client calls it."""
    one = await store()
    await one.put("alice", key, b"hers")
    assert await one.get("alice", key) == b"hers"
    for owner in ("bob", "", "alice.>", "*"):
        assert not await has(one, owner, key)
    assert not await has(one, "alice", "resp_1")


async def test_large_ones_come_back_whole(store: Make) -> None:
    one, other = await store(), await store()
    data = b"".join(number.to_bytes(4) for number in range(CHUNK))
    await one.put("alice", "large", data)
    await one.put("alice", "exact", data[:CHUNK])
    assert await other.get("alice", "large") == data
    assert await other.get("alice", "exact") == data[:CHUNK]


async def test_the_oldest_of_the_same_owner_go_first(store: Make) -> None:
    one = await store(max_bytes=64 << 10)
    await one.put("bob", "his", b"his")
    for number in range(20):
        await one.put("alice", str(number), bytes(10 << 10))
    assert [await has(one, "alice", str(number)) for number in (0, 10, 18, 19)] == [False, False, True, True]
    assert await has(one, "bob", "his")


async def test_they_are_forgotten_in_time(store: Make) -> None:
    one = await store(age=1.0)
    await one.put("alice", "resp", b"data")
    assert await has(one, "alice", "resp")

    async def gone() -> bool:
        return not await has(one, "alice", "resp")

    await until(gone, 10)


async def read(parts: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in parts]


async def test_questions_are_answered_in_parts(store: Make) -> None:
    one, other = await store(), await store()

    async def answer(question: bytes) -> AsyncIterator[bytes]:
        for number in range(int(question)):
            yield b"%d" % number
            await asyncio.sleep(0)

    await one.listen("frontend-1", answer)

    async def ask() -> bool:
        try:
            return await read(other.ask("frontend-1", b"3")) == [b"0", b"1", b"2"]
        except PeerGone:  # the server may not know yet that it listens
            return False

    await until(ask, 10)
    several = await asyncio.gather(*(read(other.ask("frontend-1", b"%d" % count)) for count in range(5)))
    assert [len(parts) for parts in several] == [0, 1, 2, 3, 4]


async def test_nothing_answers_for_a_frontend_that_is_not_there(store: Make) -> None:
    one = await store()
    with pytest.raises(PeerGone):
        await read(one.ask("frontend-9", b"?"))


async def test_a_long_answer_of_a_frontend_that_is_slow(store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is still there."""
    monkeypatch.setattr(responses, "SILENT", 0.5)
    monkeypatch.setattr(responses, "ALIVE", 0.05)
    one, other = await store(), await store()
    go = asyncio.Event()

    async def answer(_: bytes) -> AsyncIterator[bytes]:
        yield b"first"
        await go.wait()
        yield b"second"

    await one.listen("frontend-1", answer)
    await asyncio.sleep(0.1)
    parts = other.ask("frontend-1", b"?")
    assert await anext(parts) == b"first"
    waiting = asyncio.ensure_future(anext(parts))
    await asyncio.wait({waiting}, timeout=1.0)
    assert not waiting.done()
    go.set()
    assert await waiting == b"second"
    await parts.aclose()  # type: ignore[attr-defined]


async def test_an_answer_ends_when_nothing_reads_it(store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is long in coming: a client that asks and leaves, again and again, must not leave answers behind."""
    monkeypatch.setattr(responses, "ALIVE", 0.05)
    one, other = await store(), await store()
    ended = asyncio.Event()

    async def answer(_: bytes) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    await one.listen("frontend-1", answer)
    await asyncio.sleep(0.1)
    parts = other.ask("frontend-1", b"?")
    assert await anext(parts) == b"first"
    await parts.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        await ended.wait()


async def test_an_outage_is_told_at_once(nats_outage: NatsOutage, credentials: Credentials) -> None:
    async with JetStreamResponses(nats_outage.server.url, "ns", StoreLimits(), credentials) as store:
        await store.put("alice", "resp", b"data")
        await nats_outage.down()
        async with asyncio.timeout(5):
            with pytest.raises(QueueUnavailable):
                await store.put("alice", "other", b"data")
            with pytest.raises(QueueUnavailable):
                await store.get("alice", "resp")
            with pytest.raises(QueueUnavailable):
                await read(store.ask("frontend", b"?"))
        await nats_outage.up(lose_data=False)
        await until(lambda: store._connection.connected)
        assert not await has(store, "alice", "resp")  # it was in the server's memory
        await store.put("alice", "resp", b"again")
        assert await store.get("alice", "resp") == b"again"
