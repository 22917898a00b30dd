"""The queue's stream and consumer are changed or removed while workers use them, and restored."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import nats
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from pdserve.queue.base import PrefillQueue
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import CONSUMER
from pdserve.util.errors import QueueUnavailable
from tests.conditions import until
from tests.queue.conftest import BOUND, nats_queues
from tests.queue.requests import ids, publish

Change = Callable[[JetStreamContext, StreamConfig], Awaitable[object]]
_numbers = count()


@asynccontextmanager
async def by_hand(url: str, namespace: str) -> AsyncIterator[tuple[JetStreamContext, str]]:
    """Yield JetStream and the name of the namespace's only stream."""
    client = await nats.connect(url)
    try:
        js = client.jetstream()
        names = [info.config.name or "" for info in await js.streams_info()]
        (stream,) = [name for name in names if f"+{namespace}+" in name]
        yield js, stream
    finally:
        await client.close()


def updated(**changes: Any) -> Change:
    return lambda js, config: js.update_stream(replace(config, **changes))


def made_anew(**changes: Any) -> Change:
    async def change(js: JetStreamContext, config: StreamConfig) -> None:
        await js.delete_stream(config.name or "")
        await js.add_stream(replace(config, **changes))

    return change


async def deleted(js: JetStreamContext, config: StreamConfig) -> None:
    await js.delete_stream(config.name or "")


async def goes_on(decode: PrefillQueue, prefill: PrefillQueue) -> bool:
    """Whether a request passes the queue. A request stored while the stream is recreated is lost."""
    name = f"r{next(_numbers)}"
    try:
        await publish(decode, name)
        pulled: list[str] = []
        while found := await prefill.pull(5, 0.1):
            pulled += ids(found)
            for delivery in found:
                await delivery.ack()
    except QueueUnavailable:
        return False
    return name in pulled


@pytest.mark.parametrize(
    ("change", "description"),
    [
        (
            updated(
                description="ours",
                max_msgs=1,
                max_bytes=100,
                max_msg_size=10,
                max_age=0.2,
                duplicate_window=0.1,
            ),
            "ours",
        ),
        (updated(subjects=["elsewhere"]), None),
        (updated(sealed=True), None),
        (updated(deny_delete=True, deny_purge=True), None),
        (made_anew(retention=RetentionPolicy.LIMITS, no_ack=True), None),
        (made_anew(retention=RetentionPolicy.INTEREST, allow_msg_ttl=False), None),
        (deleted, None),
    ],
    ids=["bounds", "subjects", "sealed", "no deletions", "limits, no ack", "interest, no ttl", "deleted"],
)
async def test_a_changed_stream_is_restored(
    nats_url: str, namespace: str, change: Change, description: str | None
) -> None:
    """An administrator's description of the stream is kept."""
    async with nats_queues(nats_url, namespace) as queues:
        decode, prefill = await queues(), await queues()
        assert await goes_on(decode, prefill)
        async with by_hand(nats_url, namespace) as (js, stream):
            before = (await js.stream_info(stream)).config
            await change(js, before)

            async def mended() -> bool:
                with suppress(NotFoundError):
                    now = (await js.stream_info(stream)).config
                    return now == replace(before, description=description, metadata=now.metadata)
                return False

            await until(mended)
        await until(lambda: goes_on(decode, prefill))
        await until(lambda: decode.depth == prefill.depth == 0)


@pytest.mark.parametrize(
    "changes",
    [{"ack_wait": 99.0, "max_ack_pending": 1, "max_deliver": 1}, {"deliver_subject": "elsewhere"}],
    ids=["numbers", "to a subject"],
)
async def test_a_changed_consumer_is_restored(nats_url: str, namespace: str, changes: dict[str, Any]) -> None:
    async with nats_queues(nats_url, namespace) as queues:
        decode, prefill = await queues(), await queues()
        async with by_hand(nats_url, namespace) as (js, stream):
            before = (await js.consumer_info(stream, CONSUMER)).config
            await js.delete_consumer(stream, CONSUMER)
            plain = ConsumerConfig(durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT, ack_wait=1.0)
            await js.add_consumer(stream, replace(plain, **{"max_ack_pending": BOUND, **changes}))

            async def mended() -> bool:
                with suppress(NotFoundError):  # the consumer was deleted and is not yet made anew
                    now = (await js.consumer_info(stream, CONSUMER)).config
                    return all(getattr(now, name) == getattr(before, name) for name in changes)
                return False

            await until(mended)
        await until(lambda: goes_on(decode, prefill))


async def test_a_stream_on_disk_is_used_as_it_is(nats_url: str, namespace: str) -> None:
    async with nats_queues(nats_url, namespace) as queues:
        decode, prefill = await queues(), await queues()
        async with by_hand(nats_url, namespace) as (js, stream):
            config = (await js.stream_info(stream)).config
            await made_anew(storage=StorageType.FILE)(js, config)
            await until(lambda: goes_on(decode, prefill))
            assert (await js.stream_info(stream)).config.storage == StorageType.FILE


async def test_the_depth_of_a_recreated_stream_is_known(nats_url: str, namespace: str) -> None:
    """The new stream's sequence numbers begin at 1."""
    async with nats_queues(nats_url, namespace) as queues:
        decode, prefill = await queues(), await queues()
        for _ in range(8):
            assert await goes_on(decode, prefill)
        async with by_hand(nats_url, namespace) as (js, stream):
            await js.delete_stream(stream)
        await until(lambda: goes_on(decode, prefill))
        await publish(decode, "a", "b", "c")
        await until(lambda: decode.depth == 3)


async def test_asking_a_worker_that_never_replies_times_out(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.queue.jetstream.queue.REPLY_TIMEOUT", 0.3)
    async with nats_queues(nats_url, namespace) as queues:
        decode = await queues()
        assert isinstance(decode, JetStreamQueue)
        client = await nats.connect(nats_url)
        try:
            await client.subscribe(decode._names.addressed("prefill-0"))
            await client.flush()
            with pytest.raises(TimeoutError):
                await decode.listens("prefill-0")
        finally:
            await client.close()

        async def no_longer_listens() -> bool:
            """The server may not know yet that the connection is closed."""
            with suppress(TimeoutError):
                return not await decode.listens("prefill-0")
            return False

        await until(no_longer_listens)
