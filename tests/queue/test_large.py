"""Prompts over a megabyte, on the NATS that `serve` starts."""

import pytest

from pdserve.contract.messages import encode
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import StreamLimits
from pdserve.util.errors import QueueFull
from tests.queue.requests import publish, request


async def test_a_prompt_of_more_than_a_megabyte_passes_the_queue(nats_url: str, namespace: str) -> None:
    large = request("large", prompt=400_000)
    assert len(encode(large)) > 1 << 20
    async with (
        JetStreamQueue(nats_url, namespace, "m") as decode,
        JetStreamQueue(nats_url, namespace, "m") as prefill,
    ):
        assert decode.max_payload == 8 << 20  # as nats.conf has it
        await decode.publish(large)
        (delivery,) = await prefill.pull(1, 5.0)
        assert delivery.request == large
        await delivery.ack()


async def test_large_prompts_are_bounded_together(nats_url: str, namespace: str) -> None:
    """Queued prompts take the server's memory."""
    async with JetStreamQueue(nats_url, namespace, "m", StreamLimits(max_bytes=1 << 20)) as queue:
        for number in range(2):
            await queue.publish(request(f"large-{number}", prompt=100_000))
        with pytest.raises(QueueFull):
            await queue.publish(request("large-2", prompt=100_000))
        assert queue.depth == 2
        for delivery in await queue.pull(1, 1.0):
            await delivery.ack()
        await publish(queue, "small")


async def test_a_server_may_have_less_memory_than_the_bound(nats_url: str, namespace: str) -> None:
    async with JetStreamQueue(nats_url, namespace, "m", StreamLimits(max_bytes=1 << 50)) as queue:
        await publish(queue, "a")
        assert len(await queue.pull(1, 1.0)) == 1
