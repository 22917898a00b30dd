"""The Compose files are consistent, and real servers start with their flags (except ports and folders): one of
each, and clusters of three."""

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pdserve_bench.graphs.clusters import EtcdMember, Member, NatsMember, addresses, cluster

from pdserve.config.env_overrides import VARIABLES
from pdserve.config.load import load as load_config
from pdserve.demo import FILE as DEMO
from pdserve.install.engine_venv import LOCKS, PLATFORMS
from pdserve.queue import connect as connect_queue
from pdserve.registry import connect as connect_registry
from pdserve.security.credentials import Credentials, create
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, etcd_binary, nats_binary
from pdserve.util.errors import ConfigError
from pdserve.util.net import free_port
from tests.conditions import until
from tests.deploy.compose import FOLDER, HEALTH_KEYS, SERVICE_KEYS, load, replaced
from tests.queue.requests import publish
from tests.tcp import tcp_server

BASE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
CLUSTER = "docker-compose.cluster.yml"


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU), (CLUSTER,)], ids=["cpu", "gpu", "cluster"])
def test_services_have_known_keys_pinned_images_and_volumes(files: tuple[str, ...]) -> None:
    compose = load(*files)
    assert set(compose) == {"name", "services", "volumes"}
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service["healthcheck"]) == HEALTH_KEYS, name
        assert service["healthcheck"]["test"][0] == "CMD", "not CMD-SHELL: the etcd image has no shell"
    for name in ("nats", "etcd"):
        service = compose["services"][name]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-alpine)?", service["image"])
        assert service["image"] == load(BASE)["services"][name]["image"]
        volume, *mounted = service["volumes"]
        assert all(each.startswith("./") and each.endswith(":ro") for each in mounted)
        kept, folder = volume.split(":")
        assert kept in compose["volumes"]
        assert any(word.endswith(f"={folder}") for word in service["command"])


def test_nats_and_etcd_are_on_loopback_unless_another_address_is_set() -> None:
    for compose, address in ((load(BASE), "127.0.0.1"), (load(BASE, PDSERVE_BIND="10.0.0.5"), "10.0.0.5")):
        published = [port for name in ("nats", "etcd") for port in compose["services"][name]["ports"]]
        assert len(published) == 2
        assert all(re.fullmatch(rf"{re.escape(address)}:\d+:\d+", port) for port in published)


def test_pdserve_is_a_profile_that_finds_its_servers() -> None:
    compose = load(BASE, NATS_PORT="14222", ETCD_PORT="12379")
    service = compose["services"]["pdserve"]
    assert service["profiles"] == ["pdserve"]
    assert "profiles" not in compose["services"]["nats"]
    assert service["environment"]["PDSERVE_NATS"] == "nats://127.0.0.1:14222"
    assert service["environment"]["PDSERVE_ETCD"] == "127.0.0.1:12379"
    assert "127.0.0.1:14222:4222" in compose["services"]["nats"]["ports"]
    assert "127.0.0.1:12379:2379" in compose["services"]["etcd"]["ports"]
    assert all(one["condition"] == "service_healthy" for one in service["depends_on"].values())
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert (FOLDER / ".." / service["command"][-1]).is_file()


def test_the_gpu_file_adds_gpus() -> None:
    service = load(BASE, GPU)["services"]["pdserve"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert service["build"]["args"] == {"PLATFORM": "gpu"}
    assert service["environment"]["PDSERVE_NATS"]
    assert (FOLDER / ".." / service["command"][-1]).is_file()


def test_the_files_that_docker_may_read_exist() -> None:
    let_in = [
        line[1:]
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    root = FOLDER.parent
    assert {"pyproject.toml", "README.md", "LICENSE", "configs", "pdserve", "benchmarks"} <= set(let_in)
    assert all((root / name).exists() for name in let_in)
    arguments = set(re.findall(r"^ARG (\w+)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE))
    assert arguments == {"BASE", "PLATFORM"}


def test_the_image_pins_its_base_and_packages() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", "")
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    (base,) = re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    installs = [part for part in re.split(r"&&|^RUN", text, flags=re.MULTILINE) if "pip install" in part]
    assert len(installs) == 2
    assert all(re.search(r"--constraint \S+/(cpu|\$\{PLATFORM\})\.txt", each) for each in installs)
    assert "--no-deps --no-build-isolation" in text
    ours = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    for platform in PLATFORMS:
        locked = set(re.findall(r"^([\w.-]+)==", (LOCKS / f"{platform}.txt").read_text(), re.MULTILINE))
        assert {re.split(r"[=<>]", each)[0] for each in ours} | {"setuptools"} <= locked


@pytest.mark.parametrize("page", ["deploy/Dockerfile", "docs/deployment.md"])
def test_docker_run_publishes_the_api(page: str) -> None:
    """The command binds to all addresses of the container, with a key. Without a key, the configuration is refused."""
    (command,) = re.findall(r"docker run (.* pdserve)$", (FOLDER.parent / page).read_text(), re.MULTILINE)
    given = dict(each.split("=", 1) for each in re.findall(r"-e (\S+)", command))
    config = load_config(DEMO, given)
    assert config.frontend is not None
    assert config.frontend.host == "0.0.0.0"
    assert f"-p {config.frontend.port}:{config.frontend.port} " in command
    with pytest.raises(ConfigError, match="which other machines reach, but the API has no keys"):
        load_config(DEMO, given | {"PDSERVE_API_KEYS": ""})


def test_pdserve_runs_from_a_published_image() -> None:
    given = {"PDSERVE_IMAGE": "registry.example.com/pdserve:0.1.0", "PDSERVE_ALLOW": "no-keys,plain-http"}
    for files in ((BASE,), (BASE, GPU)):
        service = load(*files, **given)["services"]["pdserve"]
        assert service["image"] == given["PDSERVE_IMAGE"]
        assert load(*files)["services"]["pdserve"]["image"] == f"pdserve{':gpu' * (len(files) - 1)}"
        assert service["environment"]["PDSERVE_ALLOW"] == given["PDSERVE_ALLOW"]
        ours = {name for name in service["environment"] if name.startswith("PDSERVE_")}
        assert ours <= {*VARIABLES, "PDSERVE_API_KEYS"}


async def test_the_health_check_of_pdserve_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    check = load(BASE, PDSERVE_PORT="0")["services"]["pdserve"]["healthcheck"]["test"]
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    async with tcp_server(serve) as port:
        words = [sys.executable, *replaced(check[2:], {"127.0.0.1:0/": f"127.0.0.1:{port}/"})]
        assert await _run(words) == 0
    assert asked == [b"GET /health HTTP/1.1\r\n"]
    assert await _run(words) != 0


def _mounted(service: str, folder: str) -> str:
    """The path beside the Compose file that a container sees as `folder`."""
    mounts = (volume.split(":") for volume in load(BASE)["services"][service]["volumes"])
    return next(str(source) for source, target, *_ in mounts if target == folder)


def test_all_services_of_the_graph_have_the_credentials() -> None:
    services = load(BASE, CREDENTIALS="/secrets")["services"]
    graph = [service for service in services.values() if service.get("profiles") != ["watch"]]
    assert all("/secrets:/credentials:ro" in service["volumes"] for service in graph)
    assert services["pdserve"]["environment"]["PDSERVE_CREDENTIALS"] == "/credentials"
    assert (
        f"deploy/{Path(_mounted('nats', '/credentials')).name}/" in (FOLDER.parent / ".gitignore").read_text()
    )


class _ComposeNats(EmbeddedNats):
    """A nats-server with the Compose file's flags and file, except ports and folders."""

    def __init__(self, state_dir: Path, credentials: Credentials) -> None:
        super().__init__(state_dir, credentials=credentials)
        self.monitor = free_port("127.0.0.1")

    def command(self) -> list[str]:
        assert self.credentials
        seen = "/etc/pdserve/nats.conf"
        text = (FOLDER / _mounted("nats", seen)).read_text()
        conf = self.state_dir / "nats.conf"
        conf.write_text(
            "\n".join(replaced(text.splitlines(), {"127.0.0.1:8222": f"127.0.0.1:{self.monitor}"}))
        )
        words = load(BASE)["services"]["nats"]["command"]
        ours = {"=0.0.0.0": f"={self.host}", "=4222": f"={self.port}", seen: str(conf)}
        ours |= {"/credentials": str(self.credentials.folder), "=/data": f"={self.data_dir}"}
        return [str(nats_binary()), *replaced(words[1:], ours)]


async def test_nats_with_the_flags_of_the_file_is_healthy(tmp_path: Path, credentials: Credentials) -> None:
    check = load(BASE)["services"]["nats"]["healthcheck"]["test"]
    asked = urlsplit(check[-1])
    assert check[1] == "wget"
    async with _ComposeNats(tmp_path, credentials) as server, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{server.monitor}{asked.path}?{asked.query}")
        assert answer.status_code == 200
        with pytest.raises(ConfigError, match="requires TLS"):
            async with connect_queue(server.url, "ns", "m"):
                pass
        async with connect_queue(server.url, "ns", "m", credentials) as queue:
            await publish(queue, "r")
            assert queue.max_payload == 8 << 20
        assert (server.data_dir / "jetstream").is_dir()


class _ComposeEtcd(EmbeddedEtcd):
    """An etcd with the Compose file's flags, except ports and folder."""

    def command(self) -> list[str]:
        words = load(BASE)["services"]["etcd"]["command"]
        assert self.credentials
        ours = {"0.0.0.0:2379": self.url, "etcd:2379": self.url, "127.0.0.1:2380": "127.0.0.1:0"}
        ours |= {"/credentials": str(self.credentials.folder)}
        return [str(etcd_binary()), *replaced(words[1:], ours | {"=/data": f"={self.data_dir}/data"})]


async def test_etcd_with_the_flags_of_the_file_is_healthy(tmp_path: Path, credentials: Credentials) -> None:
    check = _etcdctl(load(BASE)["services"]["etcd"]["healthcheck"]["test"])
    async with _ComposeEtcd(tmp_path, credentials=credentials) as server:
        check = replaced(check, {"127.0.0.1:2379": server.url, "/credentials": str(credentials.folder)})
        assert await _run(check) == 0
        check.append("--command-timeout=500ms")  # failing checks end soon
        assert await _run([word for word in check if not word.startswith(("--cert", "--key"))]) != 0
        async with connect_registry(server.url, "ns", credentials) as registry:
            await registry.put("a", b"1")
            assert await registry.read("") == {"a": b"1"}
    assert await _run(check) != 0


def _etcdctl(check: list[Any]) -> list[str]:
    assert check[1] == "/usr/local/bin/etcdctl"
    return [str(etcd_binary().with_name("etcdctl")), *check[2:]]


async def _run(words: list[str]) -> int:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
    return await process.wait()


# three hosts

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def _command_of(server: str, number: int) -> list[str]:
    variables = {f"NODE_{each}": host for each, host in enumerate(HOSTS, 1)}
    command: list[str] = load(CLUSTER, NODE=HOSTS[number], **variables)["services"][server]["command"]
    return command[1:]


class _OfHost(Member):
    def __init__(self, *of_member: Any) -> None:
        super().__init__(*of_member)
        self.number, self.health = self.peers.index(self.peer_port), free_port(HOSTS[0])
        self.host = HOSTS[self.number]


class _ClusterNats(_OfHost, NatsMember):
    def command(self) -> list[str]:
        assert self.credentials
        folder = {"/credentials": str(self.credentials.folder)}
        conf = self.state_dir / f"{self.name}.conf"
        text = (FOLDER / "nats.cluster.conf").read_text()
        conf.write_text("\n".join(replaced(text.splitlines(), folder)))
        ours = folder | {"=4222": f"={self.port}", "=8222": f"={self.health}", "=/data": f"={self.data_dir}"}
        ours |= {f"{host}:6222": f"{host}:{port}" for host, port in zip(HOSTS, self.peers, strict=True)}
        ours |= {"/etc/pdserve/nats.conf": str(conf)}
        return [str(nats_binary()), *replaced(_command_of("nats", self.number), ours)]


class _ClusterEtcd(_OfHost, EtcdMember):
    def command(self) -> list[str]:
        assert self.credentials
        ours = {f"{host}:2380": f"{host}:{port}" for host, port in zip(HOSTS, self.peers, strict=True)}
        ours |= {f"{self.host}:2379": self.url, "=/data": f"={self.data_dir}/data"}
        ours |= {"/credentials": str(self.credentials.folder)}
        return [str(etcd_binary()), *replaced(_command_of("etcd", self.number), ours)]


@pytest.fixture
def host_credentials(tmp_path: Path) -> Credentials:
    return create(tmp_path / "credentials", HOSTS)


async def test_three_nats_servers_are_a_cluster(tmp_path: Path, host_credentials: Credentials) -> None:
    async with (
        cluster(_ClusterNats, tmp_path, host_credentials) as members,
        connect_queue(addresses(members), "ns", "m", host_credentials) as queue,
        httpx.AsyncClient() as http,
    ):
        await until(lambda: queue.connected)
        await publish(queue, "r")
        assert queue.max_payload == 8 << 20
        for member in members:
            assert isinstance(member, _ClusterNats)
            page = f"http://127.0.0.1:{member.health}/healthz?js-enabled-only=true"
            assert (await http.get(page)).status_code == 200
            with pytest.raises(ConnectionRefusedError):  # the page is on 127.0.0.1 only
                await asyncio.open_connection("127.0.0.9", member.health)


async def test_three_etcds_are_a_cluster(tmp_path: Path, host_credentials: Credentials) -> None:
    async with cluster(_ClusterEtcd, tmp_path, host_credentials) as members:
        async with connect_registry(members[0].url, "ns", host_credentials) as registry:
            await registry.put("a", b"1")
        async with connect_registry(members[2].url, "ns", host_credentials) as registry:
            await registry.put("b", b"1", leased=False)
            assert (await registry.read(""))["b"] == b"1"


def test_commands_in_the_cluster_file_name_the_same_hosts() -> None:
    head = (FOLDER / CLUSTER).read_text().partition("name:")[0]
    hosts = re.findall(r"--host (\S+)", head)
    assert re.findall(r"NODE_\d=(\S+)", head) == hosts
    assert all(f"nats://{host}:4222" in head and f"{host}:2379" in head for host in hosts)
