import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from pdserve.credentials import Credentials
from pdserve.errors import QueueUnavailable
from pdserve.queue.broadcast import Broadcast
from pdserve.queue.jetstream.broadcast import NatsBroadcast
from pdserve.queue.memory import MemoryBroadcast, MemoryBroker
from tests.conditions import until
from tests.queue.conftest import NatsOutage

Make = Callable[[str], Broadcast]


@pytest.fixture(params=["memory", "nats"])
def make(request: pytest.FixtureRequest, namespace: str) -> Make:
    if request.param == "memory":
        broker = MemoryBroker()
        return lambda topic: MemoryBroadcast(broker, f"{namespace}.{topic}")
    url: str = request.getfixturevalue("nats_url")
    return lambda topic: NatsBroadcast(url, namespace, topic, "nothing happens")


async def hears(sender: Broadcast, messages: AsyncIterator[bytes], message: bytes) -> None:
    """Until it comes: what is sent while a connection is made is lost."""

    async def read() -> None:
        while await anext(messages) != message:
            pass

    reading = asyncio.create_task(read())

    async def send() -> bool:
        with suppress(QueueUnavailable):
            await sender.send(message)
        await asyncio.sleep(0.05)
        return reading.done()

    await until(send, within=15)
    await reading


async def refuses(sender: Broadcast) -> bool:
    try:
        await sender.send(b"lost")
    except QueueUnavailable:
        return True
    return False


async def test_all_that_listen_hear_it_in_order(make: Make) -> None:
    async with AsyncExitStack() as stack:
        one, other, third = [await stack.enter_async_context(make("usage")) for _ in range(3)]
        elsewhere = await stack.enter_async_context(make("other"))
        heard = [each.messages() for each in (one, other, third)]
        for messages in heard:
            await hears(one, messages, b"ready")
        for number in range(5):
            await other.send(b"%d" % number)
        for messages in heard:
            found = [message async for message in until_last(messages, b"4")]
            assert [message for message in found if message != b"ready"] == [b"0", b"1", b"2", b"3", b"4"]
        apart = elsewhere.messages()
        await hears(elsewhere, apart, b"apart")


async def until_last(messages: AsyncIterator[bytes], last: bytes) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message
        if message == last:
            return


async def test_it_goes_on_after_an_outage(nats_outage: NatsOutage, credentials: Credentials) -> None:
    url = nats_outage.server.url
    async with (
        NatsBroadcast(url, "ns", "usage", "nothing happens", credentials) as one,
        NatsBroadcast(url, "ns", "usage", "nothing happens", credentials) as other,
    ):
        messages = other.messages()
        await hears(one, messages, b"before")
        await nats_outage.down()
        await until(lambda: refuses(one), within=10)
        await nats_outage.up(lose_data=True)
        await hears(one, messages, b"after")
