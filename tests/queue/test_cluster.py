"""A NATS cluster of three servers loses one. (`tests/chaos/test_clusters.py` loses two.)"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from pdserve_bench.graphs.clusters import NatsMember, addresses, cluster

from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.jetstream.client import PASSING, short_connection
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import CONSUMER
from pdserve.security.credentials import Credentials
from pdserve.util.errors import QueueUnavailable
from tests.conditions import until
from tests.queue.conftest import Queues, nats_queues
from tests.queue.requests import publish
from tests.servers import hung, killed


class NatsCluster:
    def __init__(self, members: list[NatsMember], credentials: Credentials) -> None:
        self.members = members
        self.credentials = credentials

    def queues(self) -> Queues:
        """Return queues with an `ack_wait` longer than a cluster's election of a leader."""
        return nats_queues(addresses(self.members), "ns", self.credentials, ack_wait=15.0)

    async def ask(self, queue: PrefillQueue, what: str) -> dict[str, object]:
        """Ask a running server for the state of the queue's stream or consumer."""
        assert isinstance(queue, JetStreamQueue)
        subject = f"$JS.API.{what}.INFO.{queue._names.stream}" + f".{CONSUMER}" * (what == "CONSUMER")
        for member in self.members:
            if member.child is not None and member.child.running:
                with suppress(*PASSING):
                    async with short_connection(member.url, self.credentials.client) as client:
                        found: dict[str, object] = json.loads((await client.request(subject, b"")).data)
                        if "error" not in found:
                            return found
        return {}

    async def leader(self, queue: PrefillQueue, what: str) -> NatsMember | None:
        found = (await self.ask(queue, what)).get("cluster")
        name = found.get("leader") if isinstance(found, dict) else None
        return next((member for member in self.members if member.name == name), None)

    async def replicas(self, queue: PrefillQueue) -> int:
        config = (await self.ask(queue, "STREAM")).get("config")
        return int(config["num_replicas"]) if isinstance(config, dict) else 0

    async def whole(self, queue: PrefillQueue) -> bool:
        """Whether all servers have all of the queue."""
        found = [(await self.ask(queue, what)).get("cluster") for what in ("STREAM", "CONSUMER")]
        replicas = [each.get("replicas", []) for each in found if isinstance(each, dict)]
        return [[each["current"] for each in some] for some in replicas] == 2 * [[True, True]]

    async def empty(self, queue: PrefillQueue) -> bool:
        """Whether all stored requests are acked."""
        state = (await self.ask(queue, "STREAM")).get("state")
        return isinstance(state, dict) and state["messages"] == 0


@pytest.fixture
async def nats_cluster(tmp_path: Path, credentials: Credentials) -> AsyncIterator[NatsCluster]:
    async with cluster(NatsMember, tmp_path, credentials) as members:
        yield NatsCluster(members, credentials)


async def stored(queue: PrefillQueue, name: str) -> str:
    """Store a request; return its id. A failed try is withdrawn; the next has another id."""
    for number in count():
        with suppress(QueueUnavailable):
            await publish(queue, f"{name} {number}")
            return f"{name} {number}"
        await asyncio.sleep(0.05)
    raise AssertionError


async def pulled(queue: PrefillQueue) -> Delivery:
    """Pull one request; retry after failures."""
    while True:
        with suppress(QueueUnavailable):
            for delivery in await queue.pull(1, 5):
                return delivery
        await asyncio.sleep(0.05)


@pytest.mark.timeout(300)
async def test_the_loss_of_a_leader_loses_no_request(nats_cluster: NatsCluster) -> None:
    """The stream's leader is killed, the consumer's is suspended. Queued requests stay; acks sent meanwhile arrive."""
    async with nats_cluster.queues() as queues:
        decode, prefill = await queues(), await queues()
        for what, harm in (("STREAM", killed), ("CONSUMER", hung)):
            await until(lambda: nats_cluster.whole(decode), 60)
            await stored(decode, f"{what} held")
            queued = await stored(decode, f"{what} queued")
            held = await pulled(prefill)
            leader = await nats_cluster.leader(decode, what)
            assert leader is not None
            async with harm(leader):
                await held.ack()
                new = await stored(decode, what)
                for expected in (queued, new):
                    delivery = await pulled(prefill)
                    assert delivery.request.request_id == expected
                    await delivery.ack()
                await until(lambda: nats_cluster.empty(decode), 60)
        assert decode.losses == prefill.losses == 0


async def test_the_stream_gets_the_configured_replicas(nats_cluster: NatsCluster) -> None:
    async with (
        nats_queues(nats_cluster.members[0].url, "ns", nats_cluster.credentials) as alone,
        nats_cluster.queues() as queues,
    ):
        decode = await alone()
        old = await stored(decode, "a")
        assert await nats_cluster.replicas(decode) == 1
        await queues()

        async def replicated() -> bool:
            return await nats_cluster.replicas(decode) == 3

        await until(replicated)
        assert (await pulled(decode)).request.request_id == old
