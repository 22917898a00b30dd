"""Prompts over a megabyte, on the NATS that `serve` starts."""

from pdserve.messages import PrefillRequest, encode
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.supervisor.embedded import MAX_PAYLOAD


async def test_a_prompt_of_more_than_a_megabyte(nats_url: str, namespace: str) -> None:
    prompt = [100_000 + number for number in range(400_000)]
    request = PrefillRequest("large", "decode-0-a", prompt, 60.0, 16, [b"body"])
    assert len(encode(request)) > 1 << 20
    async with (
        JetStreamQueue(nats_url, namespace, "m") as decode,
        JetStreamQueue(nats_url, namespace, "m") as prefill,
    ):
        assert decode.max_payload == MAX_PAYLOAD
        await decode.publish(request)
        (delivery,) = await prefill.pull(1, 5.0)
        assert delivery.request.prompt == prompt
        await delivery.ack()
