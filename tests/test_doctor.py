"""The checks of `pdserve doctor`, against real servers."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from pdserve.cli.doctor import Finding, check_etcd, check_graph, check_nats, check_peers, check_ports
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.credentials import Credentials, create
from pdserve.plan.plan import Plan, make_plan
from pdserve.ports import free_port
from pdserve.records import Instance, Role, encode_record
from pdserve.registry import etcd, keys
from pdserve.supervisor import state
from pdserve.supervisor.state import GraphRecord
from tests.memory.registry import MemoryRegistry, MemoryServer
from tests.plan.models import machine
from tests.servers import etcd_server, nats_server


async def of_etcd(address: str, credentials: Credentials | None = None) -> Finding:
    config = Config(Path(), "", "", None, None, None, etcd=address, namespace=f"doctor-{os.getpid()}")
    (finding,) = [finding async for finding in check_etcd(config, credentials)]
    return finding


async def test_servers_that_do_not_answer_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "CONNECT_WITHIN", 0.5)
    port = free_port("127.0.0.1")
    for finding in (
        await check_nats(f"nats://127.0.0.1:{port}", None),
        await of_etcd(f"127.0.0.1:{port}"),
    ):
        assert finding.grade == "fail"
        assert str(port) in finding.text
        assert "or correct Graph." in finding.text


async def test_servers_with_credentials(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create(tmp_path / "other")
    async with (
        nats_server(tmp_path, credentials=credentials) as nats,
        etcd_server(tmp_path, credentials=credentials) as server,
    ):
        assert (await check_nats(nats.url, credentials)).grade == "ok"
        assert (await of_etcd(server.url, credentials)).grade == "ok"
        monkeypatch.setattr(etcd, "CONNECT_WITHIN", 0.5)
        for wrong in (await check_nats(nats.url, other), await of_etcd(server.url, other)):
            assert wrong.grade == "fail"
            assert "credentials" in wrong.text


async def test_peers_that_are_not_reached_fail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here, nowhere = listening.getsockname()[1], free_port("127.0.0.1")
        address, metrics = f"tcp://127.0.0.1:{here}", f"http://127.0.0.1:{nowhere}/metrics"
        worker = Instance("decode-0-ab", Role.DECODE, address=address, metrics=metrics)
        async with MemoryRegistry(MemoryServer()) as registry:
            await registry.put(keys.instance(worker), encode_record(worker))
            await registry.put(f"{keys.INSTANCES}decode/other", b"of another version")
            reached, not_reached = [finding async for finding in check_peers(registry)]
    assert reached == Finding("ok", "peers", f"decode-0-ab is reached at 127.0.0.1:{here}")
    assert not_reached.grade == "fail"
    assert not_reached.text.startswith(f"decode-0-ab at 127.0.0.1:{nowhere}: ")


GRAPH = """\
Graph: {{kv-port: {kv_port}, state-dir: state}}
Frontend: {{port: {port}}}
VllmWorker: {{model: demo, {key}}}
"""


def graph(folder: Path, more: str = "", key: str = "block-size: 32") -> Path:
    """A file with ports that are free."""
    port = free_port("127.0.0.1", 2)
    file = folder / "graph.yaml"
    file.write_text(GRAPH.format(port=port, kv_port=port + 1, key=key) + more)
    return file


def plan_of(file: Path) -> Plan:
    return make_plan(load(file, {}), machine(), env={})


def refusals(plan: Plan) -> list[str]:
    return [finding.text for finding in (*check_graph(plan), *check_ports(plan)) if finding.grade == "fail"]


def test_what_serve_refuses_fails(tmp_path: Path) -> None:
    broken = "Security: {credentials: nowhere}\nProcessor: {tool-parser-plugin: /no/p.py}\n"
    plan = plan_of(graph(tmp_path, broken, "ServiceArgs: {resources: {gpu: 1}}"))
    assert refusals(plan) == list(plan.problems)
    assert len(plan.problems) == 3


def test_a_graph_that_can_be_served_is_ok(tmp_path: Path) -> None:
    file = graph(tmp_path)
    assert [each.grade for each in (*check_graph(plan_of(file)), *check_ports(plan_of(file)))] == ["ok", "ok"]
    file.write_text(file.read_text().replace("demo", "nobody/nothing-of-the-kind"))
    unknown, _note = check_graph(plan_of(file))
    assert unknown.grade == "warn"
    assert unknown.text.startswith("It cannot be said whether it fits: nobody/nothing-of-the-kind is not in")


def test_a_busy_port_and_a_state_directory_that_cannot_be_used_fail(tmp_path: Path) -> None:
    plan = plan_of(graph(tmp_path))
    assert plan.config.frontend is not None
    with socket.create_server(("127.0.0.1", plan.config.frontend.port)):
        (busy,) = refusals(plan)
    assert f"Port {plan.config.frontend.port} on 127.0.0.1 is held by" in busy
    (tmp_path / "state").write_text("a file")
    (unusable,) = refusals(plan)
    assert unusable == f"The state directory {tmp_path / 'state'} cannot be written (Graph: state-dir)."


def test_ports_of_the_running_graph_of_this_file_are_its_own(tmp_path: Path) -> None:
    file = graph(tmp_path)
    plan = plan_of(file)
    record = GraphRecord(os.getpid(), str(file.resolve()), "demo", "pdserve", "", "")
    plan.config.state_dir.mkdir()
    state.write(plan.config.state_dir, record)
    assert plan.config.frontend is not None
    with socket.create_server(("127.0.0.1", plan.config.frontend.port)):
        assert refusals(plan) == []
        state.write(plan.config.state_dir, msgspec.structs.replace(record, config="/another.yaml"))
        (other,) = refusals(plan)
    assert other.startswith(
        f"Another graph runs on {plan.config.state_dir} (of /another.yaml, pid {os.getpid()})"
    )
