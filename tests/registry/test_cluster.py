"""An etcd cluster of three members loses one member, then two."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from pdserve_bench.chaos.processes.network_cut import cut_off
from pdserve_bench.graphs.clusters import EtcdMember, addresses, cluster

from pdserve.registry.base import Change
from pdserve.registry.etcd import EtcdRegistry
from pdserve.security.credentials import Credentials
from pdserve.supervisor.servers.embedded import EmbeddedServer
from tests.conditions import until
from tests.registry.conftest import TTL, following
from tests.servers import hung, kill, killed, pid_of, restart


class EtcdCluster:
    def __init__(self, members: list[EtcdMember], credentials: Credentials) -> None:
        self.members = members
        self._credentials = credentials

    def registry(self) -> EtcdRegistry:
        return EtcdRegistry(addresses(self.members), "ns", 3 * TTL, credentials=self._credentials)

    def used_by(self, registry: EtcdRegistry) -> EtcdMember:
        assert registry._session
        (member,) = [each for each in self.members if each.url == registry._session.target]
        return member

    @asynccontextmanager
    async def isolated(self, member: EmbeddedServer) -> AsyncIterator[None]:
        """Cut a member off from the other members; clients still reach it."""
        others = [pid_of(each) for each in self.members if each is not member]
        async with AsyncExitStack() as stack:
            for port in self.members[0].peers:
                await stack.enter_async_context(cut_off(pid_of(member), others, port))
            yield


@pytest.fixture
async def etcds(tmp_path: Path, credentials: Credentials) -> AsyncIterator[EtcdCluster]:
    async with cluster(EtcdMember, tmp_path, credentials) as members:
        yield EtcdCluster(members, credentials)


async def test_a_cluster_survives_lost_members(etcds: EtcdCluster) -> None:
    """A member is killed, suspended, or isolated: leases and watches continue at another member. Then the majority is
    killed and comes back."""
    async with etcds.registry() as first, etcds.registry() as other, following(other) as seen:
        await first.put("a", b"0")
        lease, expected = first._lease, {"a": b"0"}
        for number, harm in enumerate((killed, hung, etcds.isolated)):
            await seen.until(expected)
            member = etcds.used_by(first)
            async with harm(member):
                await until(lambda: first.connected and etcds.used_by(first) is not member)  # noqa: B023
                expected |= {f"after {harm.__name__}": b"%d" % number}
                await first.put(f"after {harm.__name__}", b"%d" % number)
                await seen.until(expected)
        assert first._lease == lease
        for member in etcds.members[:2]:
            await kill(member)
        await until(lambda: not first.connected and not other.connected)
        await first.put("b", b"1")
        assert seen.state == expected, "the last known topology stays"
        await asyncio.gather(*map(restart, etcds.members[:2]))
        await seen.until(expected | {"b": b"1"})
        assert Change("a", None) not in seen.changes
