"""The Compose file of a cluster's host: three of each server start with exactly its flags, and find each other."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from pdserve_bench.clusters import EtcdMember, NatsMember, addresses, cluster

from pdserve.credentials import Credentials, create
from pdserve.ports import free_port
from pdserve.queue import connect as connect_queue
from pdserve.registry import connect as connect_registry
from pdserve.supervisor.embedded import etcd_binary, nats_binary
from tests.conditions import until
from tests.deploy.compose import FOLDER, HEALTH_KEYS, SERVICE_KEYS, load, replaced
from tests.queue.requests import publish

FILE = "docker-compose.cluster.yml"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def command_of(server: str, number: int) -> list[str]:
    variables = {f"NODE_{each}": host for each, host in enumerate(HOSTS, 1)}
    command: list[str] = load(FILE, NODE=HOSTS[number], **variables)["services"][server]["command"]
    return command[1:]


class _ComposedNats(NatsMember):
    def __init__(
        self, folder: Path, number: int, peers: Sequence[int], credentials: Credentials | None
    ) -> None:
        super().__init__(folder, number, peers, credentials)
        self.host, self.number, self.health = HOSTS[number], number, free_port(HOSTS[0])

    def command(self) -> list[str]:
        assert self.credentials
        folder = {"/credentials": str(self.credentials.folder)}
        conf = self.state_dir / f"{self.name}.conf"
        text = (FOLDER / "nats.cluster.conf").read_text()
        conf.write_text("\n".join(replaced(text.splitlines(), folder)))
        ours = folder | {"=4222": f"={self.port}", "=8222": f"={self.health}", "=/data": f"={self.data_dir}"}
        ours |= {f"{host}:6222": f"{host}:{port}" for host, port in zip(HOSTS, self.peers, strict=True)}
        ours |= {"/etc/pdserve/nats.conf": str(conf)}
        return [str(nats_binary()), *replaced(command_of("nats", self.number), ours)]


class _ComposedEtcd(EtcdMember):
    def __init__(
        self, folder: Path, number: int, peers: Sequence[int], credentials: Credentials | None
    ) -> None:
        super().__init__(folder, number, peers, credentials)
        self.host, self.number = HOSTS[number], number

    def command(self) -> list[str]:
        assert self.credentials
        ours = {f"{host}:2380": f"{host}:{port}" for host, port in zip(HOSTS, self.peers, strict=True)}
        ours |= {f"{self.host}:2379": self.url, "=/data": f"={self.data_dir}/data"}
        ours |= {"/credentials": str(self.credentials.folder)}
        return [str(etcd_binary()), *replaced(command_of("etcd", self.number), ours)]


@pytest.fixture
def of_hosts(tmp_path: Path) -> Credentials:
    return create(tmp_path / "credentials", HOSTS)


async def test_three_nats_servers_are_a_cluster(tmp_path: Path, of_hosts: Credentials) -> None:
    async with (
        cluster(_ComposedNats, tmp_path, of_hosts) as members,
        connect_queue(addresses(members), "ns", "m", of_hosts) as queue,
        httpx.AsyncClient() as http,
    ):
        await until(lambda: queue.connected)
        await publish(queue, "r")
        assert queue.max_payload == 8 << 20
        for member in members:
            assert isinstance(member, _ComposedNats)
            page = f"http://127.0.0.1:{member.health}/healthz?js-enabled-only=true"
            assert (await http.get(page)).status_code == 200
            with pytest.raises(ConnectionRefusedError):  # what it says is not for others
                await asyncio.open_connection("127.0.0.9", member.health)


async def test_three_etcds_are_a_cluster(tmp_path: Path, of_hosts: Credentials) -> None:
    async with cluster(_ComposedEtcd, tmp_path, of_hosts) as members:
        async with connect_registry(members[0].url, "ns", of_hosts) as registry:
            await registry.put("a", b"1")
        async with connect_registry(members[2].url, "ns", of_hosts) as registry:
            await registry.put("b", b"1", leased=False)
            assert (await registry.read(""))["b"] == b"1"


def test_only_keys_that_exist_and_the_images_of_the_other_file() -> None:
    compose, other = load(FILE), load("docker-compose.yml")["services"]
    assert set(compose) == {"name", "services", "volumes"}
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service["healthcheck"]) == HEALTH_KEYS, name
        assert service["image"] == other[name]["image"]
        assert service["volumes"][0].split(":")[0] in compose["volumes"]


def test_its_first_lines_make_the_credentials_that_it_needs() -> None:
    head = (FOLDER / FILE).read_text().partition("name:")[0]
    hosts = re.findall(r"--host (\S+)", head)
    assert re.findall(r"NODE_\d=(\S+)", head) == hosts
    assert all(f"nats://{host}:4222" in head and f"{host}:2379" in head for host in hosts)
