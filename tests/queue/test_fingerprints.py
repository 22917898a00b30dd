"""Queues of workers with different fingerprints."""

import asyncio

import nats
import pytest

from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import QueueNames, StreamLimits
from tests.queue.conftest import Queues
from tests.queue.requests import ids, publish


async def test_queues_of_different_fingerprints_share_nothing(queues: Queues) -> None:
    old, new, other_new = [await queues("m", loaded=loaded) for loaded in ("old", "new", "new")]
    await publish(old, "a")
    await publish(new, "b")
    assert ids(await other_new.pull(5, 0.1)) == ["b"]
    assert old.depth == 1
    assert ids(await old.pull(5, 0.1)) == ["a"]


@pytest.mark.parametrize(
    ("after", "fate"), [(0.0, "removed"), (3600.0, "kept")], ids=["unused for long", "used just now"]
)
async def test_unused_streams_are_removed(nats_url: str, namespace: str, after: float, fate: str) -> None:
    def queue(loaded: str, model: str = "m") -> JetStreamQueue:
        made = JetStreamQueue(nats_url, namespace, model, StreamLimits(abandoned=after))
        made.bind(loaded)
        return made

    async with (
        queue("unused"),
        queue("with requests") as waiting,
        queue("pulled from") as pulling,
        queue("x", "n"),
    ):
        await publish(waiting, "a")
        pull = asyncio.create_task(pulling.pull(1, 5.0))
        await asyncio.sleep(0.2)
        async with queue("new") as new:
            await publish(new, "b")
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
    client = await nats.connect(nats_url)
    names = {stream.config.name for stream in await client.jetstream().streams_info()}
    await client.close()

    def exists(loaded: str, model: str = "m") -> bool:
        return QueueNames(namespace, model, loaded).stream in names

    assert exists("unused") == (fate == "kept")
    assert all(map(exists, ("with requests", "pulled from", "new")))
    assert exists("x", "n"), "another model's stream"
