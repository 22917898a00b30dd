"""Clusters of NATS or etcd servers on loopback for chaos tests. The members are `EmbeddedServer`s that find each other.
The caller restarts a dead member."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pdserve.security.credentials import Credentials
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.util.net import free_port

SIZE = 3
HOST = "127.0.0.1"


class Member(EmbeddedServer):
    def __init__(
        self, folder: Path, number: int, peers: Sequence[int], credentials: Credentials | None
    ) -> None:
        """`peers`: the cluster ports of all members."""
        self.name = f"{type(self).name}-{number}"
        super().__init__(folder, free_port(HOST), credentials=credentials)
        self.peers, self.peer_port = peers, peers[number]


class NatsMember(Member, EmbeddedNats):
    def page(self, name: str) -> str:
        """Return the URL of a monitoring page; `jsz` names JetStream's meta leader."""
        return f"http://{HOST}:{self._pages}/{name}"

    @cached_property
    def _pages(self) -> int:
        return free_port(HOST)

    def command(self) -> list[str]:
        alone = [*super().command(), "--http_port", str(self._pages)]
        cluster = ["--cluster_name", "pdserve", "--cluster", f"nats://{HOST}:{self.peer_port}"]
        routes = ",".join(f"nats://{HOST}:{port}" for port in self.peers)
        member = ["--name", self.name, *cluster, "--routes", routes]
        return [*alone, *member] if len(self.peers) > 1 else alone


class EtcdMember(Member, EmbeddedEtcd):
    def command(self) -> list[str]:
        """If a flag is repeated, etcd uses the last one."""
        scheme = "https" if self.credentials else "http"
        urls = [f"{scheme}://{HOST}:{port}" for port in self.peers]
        own = f"{scheme}://{HOST}:{self.peer_port}"
        members = ",".join(f"etcd-{number}={url}" for number, url in enumerate(urls))
        peers = [f"--listen-peer-urls={own}", f"--initial-advertise-peer-urls={own}"]
        return [*super().command(), f"--name={self.name}", *peers, f"--initial-cluster={members}"]


@dataclass(frozen=True)
class Clusters:
    nats: Sequence[NatsMember]
    etcd: Sequence[EtcdMember]

    @property
    def members(self) -> Sequence[EmbeddedServer]:
        return [*self.nats, *self.etcd]


M = TypeVar("M", NatsMember, EtcdMember)


@asynccontextmanager
async def cluster(
    kind: type[M], folder: Path, credentials: Credentials | None = None, size: int = SIZE
) -> AsyncIterator[list[M]]:
    """With `size` 1, a single server."""
    os.environ.setdefault("GODEBUG", "multipathtcp=0")  # multipath TCP cannot be cut
    ports = [free_port(HOST) for _ in range(size)]
    members = [kind(folder, number, ports, credentials) for number in range(size)]
    try:
        await asyncio.gather(*(member.start() for member in members))
        yield members
    finally:
        for member in members:
            if member.child is not None and member.child.running:
                os.killpg(member.child.pid, signal.SIGKILL)  # on SIGTERM a leader would wait for the others
        await asyncio.gather(*(member.stop() for member in members))


def addresses(members: Sequence[M]) -> str:
    """Return all addresses in the form of `Graph.nats` and `Graph.etcd`."""
    return ",".join(member.url for member in members)
