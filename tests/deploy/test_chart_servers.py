"""Clusters of three real NATS and etcd servers with the chart's arguments and files, and an etcd member that lost its
data with its pod. (Single servers: `test_chart_pods.py`.)"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from pdserve_bench.graphs.clusters import HOST, EtcdMember, NatsMember, addresses, cluster

from pdserve.queue import connect as connect_queue
from pdserve.registry import connect as connect_registry
from pdserve.security.credentials import Credentials
from pdserve.supervisor.processes.child import Child
from pdserve.supervisor.servers.embedded import etcd_binary, nats_binary
from tests.conditions import until
from tests.deploy.compose import replaced
from tests.deploy.helm import Container, combination
from tests.queue.requests import publish

CREDENTIALS = "/etc/pdserve/credentials"


def _container(name: str, server: str, image: str) -> Container:
    (found,) = [
        each for each in combination(name).containers() if each.name == server and each.spec["name"] == image
    ]
    return found


class _ChartNats(NatsMember):
    def command(self) -> list[str]:
        assert self.credentials
        text = combination("clusters").of("ConfigMap")["pdserve-nats"]["data"]["nats.conf"]
        ours = {"127.0.0.1:8222": f"127.0.0.1:{self._pages}", CREDENTIALS: str(self.credentials.folder)}
        ours["0.0.0.0:6222"] = f"{HOST}:{self.peer_port}"
        for number, port in enumerate(self.peers):
            ours[f"pdserve-nats-{number}.pdserve-nats:6222"] = f"{HOST}:{port}"
        self.state_dir.mkdir(parents=True, exist_ok=True)
        conf = self.state_dir / f"{self.name}.conf"
        conf.write_text("\n".join(replaced(text.splitlines(), ours)))
        ours = {"=0.0.0.0": f"={HOST}", "=4222": f"={self.port}", "$(POD_NAME)": self.name}
        ours |= {"/etc/pdserve/nats/nats.conf": str(conf), "=/data": f"={self.data_dir}"}
        ours[CREDENTIALS] = str(self.credentials.folder)
        return [str(nats_binary()), *replaced(_container("clusters", "nats", "nats").spec["args"], ours)]


async def test_three_nats_servers_keep_the_queue(tmp_path: Path, credentials: Credentials) -> None:
    async with cluster(_ChartNats, tmp_path, credentials) as members:
        for member in members:
            await _assert_healthy(member)
        async with connect_queue(members[0].url, "ns", "m", credentials) as queue:
            await until(lambda: queue.connected, 60)  # the first attempt may come before there is a leader
            await publish(queue, "r")


async def _assert_healthy(server: NatsMember) -> None:
    """Assert that all probes succeed."""
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = _container("clusters", "nats", "nats").spec[probe]["exec"]["command"]
        assert command[0] == "wget"
        async with httpx.AsyncClient() as client:
            answer = await client.get(server.page(command[-1].partition(":8222/")[2]))
            assert answer.status_code == 200


class _ChartEtcd(EtcdMember):
    clients: dict[int, int]
    """number of a member -> its client port"""

    def __init__(self, *of_member: Any) -> None:
        super().__init__(*of_member)
        self.number = self.peers.index(self.peer_port)
        self.clients[self.number] = self.port

    async def start(self) -> Child:
        await asyncio.to_thread(self._run_init_container)
        return await super().start()

    def command(self) -> list[str]:
        (argument,) = _container("clusters", "etcd", "etcd").spec["args"]
        return [str(etcd_binary()), argument.replace("/data", str(self.data_dir))]

    def _run_init_container(self) -> None:
        assert self.credentials
        text = combination("clusters").of("ConfigMap")["pdserve-etcd"]["data"]["member.sh"]
        ours = {"data=/data": f"data={self.data_dir}", CREDENTIALS: str(self.credentials.folder)}
        ours |= {"0.0.0.0:2379": self.url, "0.0.0.0:2380": f"{HOST}:{self.peer_port}"}
        ours |= {"$POD_NAME.pdserve-etcd:2380": f"{HOST}:{self.peer_port}"}
        ours |= {"$POD_NAME.pdserve-etcd:2379": self.url}
        for number, port in enumerate(self.peers):
            ours[f"pdserve-etcd-{number}.pdserve-etcd:2380"] = f"{HOST}:{port}"
            ours[f"pdserve-etcd-{number}.pdserve-etcd:2379"] = f"{HOST}:{self.clients[number]}"
        self.data_dir.mkdir(parents=True, exist_ok=True)
        script = self.data_dir / "member.sh"
        script.write_text("\n".join(replaced(text.splitlines(), ours)))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "POD_NAME": f"pdserve-etcd-{self.number}"}
        for _ in range(20):  # Kubernetes retries, because a young cluster replaces no members
            ran = subprocess.run(["sh", script], env=env, check=False, capture_output=True, text=True)
            if ran.returncode == 0:
                break
        assert ran.returncode == 0, ran.stderr


async def test_a_member_of_etcd_without_its_data_is_replaced(
    tmp_path: Path, credentials: Credentials
) -> None:
    _ChartEtcd.clients = {}
    async with cluster(_ChartEtcd, tmp_path, credentials) as members:
        assert "initial-cluster-state: new" in (members[2].data_dir / "etcd.yaml").read_text()
        async with connect_registry(addresses(members), "ns", credentials) as registry:
            await registry.put("a", b"1")
            await members[2].stop()
            shutil.rmtree(members[2].data_dir)
            await members[2].start()
            assert "initial-cluster-state: existing" in (members[2].data_dir / "etcd.yaml").read_text()
            await members[0].stop()
            await registry.put("b", b"2")
            async with connect_registry(members[2].url, "ns", credentials) as other:
                assert await other.read("") == {"a": b"1", "b": b"2"}
