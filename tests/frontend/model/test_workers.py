"""A link to a decode worker, from its first message to its last."""

import asyncio

from pdserve.frontend.model.workers import Link, WorkerPool
from pdserve.messages import Cancel, Failed, ToFrontend
from pdserve.records import Instance, Role
from pdserve.stream import connect
from pdserve.stream.tcp import TcpStreamServer


class Listener:
    def __init__(self) -> None:
        self.up, self.lost = asyncio.Event(), asyncio.Event()
        self.messages: list[ToFrontend] = []

    def link_up(self, link: Link) -> None:
        self.up.set()

    def received(self, link: Link, message: ToFrontend) -> None:
        self.messages.append(message)
        link.post(Cancel(["r"]))

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.set()


async def test_a_workers_last_messages_are_read_though_nothing_can_be_sent_to_it_any_more() -> None:
    """They say which requests its engine was computing when it died."""
    listener, last_messages = Listener(), [Failed(str(number), "the engine died") for number in range(500)]
    pool = WorkerPool("round-robin", "0", lambda address: connect(address, "frontend-0"), listener)
    async with TcpStreamServer("127.0.0.1") as worker:
        pool.update([Instance("decode-0", Role.DECODE, address=worker.address, vllm_version="0")], 1)
        await listener.up.wait()
        for message in last_messages:
            await worker.send("frontend-0", message)
    async with asyncio.timeout(5):
        await listener.lost.wait()
    assert listener.messages == last_messages
    await pool.close()
