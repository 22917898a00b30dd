"""Requests and deliveries for the tests of the queue."""

from pdserve.contract.messages import PrefillRequest
from pdserve.queue.base import Delivery, PrefillQueue


def request(name: str, deadline: float = 60.0, prompt: int = 4) -> PrefillRequest:
    return PrefillRequest(name, "decode-0-a", list(range(prompt)), deadline, 16, [b"body"])


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.request.request_id for delivery in deliveries]


async def publish(queue: PrefillQueue, *names: str) -> None:
    for name in names:
        await queue.publish(request(name))
