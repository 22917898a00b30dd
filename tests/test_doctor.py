"""The checks of `pdserve doctor`, against real servers and a real transfer."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve import clock
from pdserve.cli import doctor
from pdserve.cli.doctor import Finding, Grade
from pdserve.config.host import InstalledVllm
from pdserve.config.load import load
from pdserve.config.schema import Config, FrontendConfig, SecuritySection
from pdserve.credentials import Credentials, create
from pdserve.plan.machine import GIB, Gpu, Machine
from pdserve.plan.plan import Plan, make_plan
from pdserve.ports import free_port, port_holder
from pdserve.registry import etcd
from pdserve.supervisor import state
from pdserve.supervisor.embedded import nats_binary
from pdserve.supervisor.state import GraphRecord
from tests.conditions import until
from tests.servers import etcd_server, nats_server

CARD = Gpu(0, "A10", 24 * GIB)


def machine(*gpus: Gpu, build: str = "cpu", free: int = 32) -> Machine:
    return Machine(gpus, cores=2, memory=64 * GIB, available=free * GIB, build=build)


async def test_embedded_servers_are_ok() -> None:
    for finding in (await doctor.check_nats(None), await doctor.check_etcd(None)):
        assert finding.grade is Grade.OK, finding
        assert "embedded" in finding.text


async def test_configured_servers_are_ok(nats_url: str, etcd_url: str) -> None:
    for finding in (await doctor.check_nats(nats_url), await doctor.check_etcd(etcd_url)):
        assert finding.grade is Grade.OK, finding


async def test_servers_that_do_not_answer_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "CONNECT_WITHIN", 0.5)
    port = free_port("127.0.0.1")
    for finding in (
        await doctor.check_nats(f"nats://127.0.0.1:{port}"),
        await doctor.check_etcd(f"127.0.0.1:{port}"),
    ):
        assert finding.grade is Grade.FAIL
        assert str(port) in finding.text
        assert finding.advice


async def test_nats_without_jetstream_fails(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [str(nats_binary()), "--addr", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: port_holder("127.0.0.1", port) is not None)
        finding = await doctor.check_nats(f"nats://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()
    assert finding.grade is Grade.FAIL
    assert "no JetStream" in finding.text


async def test_a_transfer_is_measured() -> None:
    finding = await doctor.check_transfer()
    assert finding.grade is not Grade.FAIL, finding
    assert "GB/s" in finding.text


@pytest.mark.parametrize(
    ("finding", "grade"),
    [
        (doctor.check_gpus(machine()), Grade.OK),
        (doctor.check_gpus(machine(CARD, build="cuda")), Grade.OK),
        (doctor.check_gpus(machine(CARD, build="cpu")), Grade.WARN),
        (doctor.check_vllm(InstalledVllm()), Grade.FAIL),
        (doctor.check_memory(machine(free=32)), Grade.OK),
        (doctor.check_memory(machine(free=4)), Grade.WARN),
        (doctor.check_python(), Grade.OK),
    ],
)
def test_grades_of_the_machine(finding: Finding, grade: Grade) -> None:
    assert finding.grade is grade
    assert (grade is Grade.OK) == (not finding.advice)


async def test_servers_with_credentials(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create(tmp_path / "other")
    async with (
        nats_server(tmp_path, credentials=credentials) as nats,
        etcd_server(tmp_path, credentials=credentials) as server,
    ):
        for check, url in ((doctor.check_nats, nats.url), (doctor.check_etcd, server.url)):
            assert (await check(url, credentials)).grade is Grade.OK
        monkeypatch.setattr(etcd, "CONNECT_WITHIN", 0.5)
        wrong = await doctor.check_nats(nats.url, other), await doctor.check_etcd(server.url, other)
        assert [finding.grade for finding in wrong] == [Grade.FAIL, Grade.FAIL]
        assert all("redentials" in finding.advice for finding in wrong)


def test_what_is_open_is_a_warning(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(frontend: str = "127.0.0.1", host: str = "127.0.0.1", **security: Any) -> list[str]:
        section = SecuritySection(**security)
        config = Config(
            tmp_path,
            "",
            "",
            FrontendConfig(host=frontend),
            None,
            None,
            security=section,
            nats="nats://127.0.0.1:1",
            etcd="127.0.0.1:2",
            host=host,
        )
        return [f"{each.grade} {each.text}" for each in doctor.check_security(config)]

    monkeypatch.setenv("PDSERVE_API_KEYS", "")
    (closed,) = found()
    assert closed.startswith("ok other machines reach nothing")
    assert [text.split(",")[0] for text in found("0.0.0.0", "10.0.0.7", allow=("plain-graph",))] == [
        "warn Graph.host is 10.0.0.7",
        "warn Frontend.host is 0.0.0.0",
    ]
    (closed,) = found(host="10.0.0.7", credentials=credentials.folder)
    assert closed.startswith("ok")
    now = clock.unix()
    for days, text in ((3630, "is valid only until"), (3700, "expired on")):
        with clock.skewed(days * 86400.0):
            expires, closed = found(credentials=credentials.folder)
        assert expires.startswith(f"warn {credentials.certificate} {text} 20")
    assert clock.unix() - now < 60


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


def refusals(plan: Plan) -> list[str]:
    findings = (*doctor.check_graph(plan), *doctor.check_ports(plan.config, plan.slots))
    return [finding.text for finding in findings if finding.grade is Grade.FAIL]


@pytest.mark.parametrize(
    ("more", "key", "problem"),
    [
        ("", "ServiceArgs: {resources: {gpu: 1}}", "The graph needs 1 GPU"),
        ("Common: {model: /no/model}\n", "common-configs: [model]", "model folder /no/model not found"),
        ("Security: {credentials: nowhere}\n", "block-size: 32", "Security.credentials"),
        ("Processor: {tool-parser-plugin: /no/p.py}\n", "block-size: 32", "/no/p.py is no file"),
    ],
)
def test_what_serve_refuses_fails(tmp_path: Path, more: str, key: str, problem: str) -> None:
    file = graph(tmp_path, more, key)
    if "Common" in more:
        file.write_text(file.read_text().replace("model: demo, ", ""))
    plan = make_plan(load(file, {}), machine(), env={})
    (refusal,) = refusals(plan)
    assert problem in refusal
    assert refusal in plan.problems, "what serve says"


def test_a_graph_that_can_be_served_is_ok(tmp_path: Path) -> None:
    plan = make_plan(load(graph(tmp_path), {}), machine(), env={})
    assert refusals(plan) == []
    assert [each.grade for each in doctor.check_graph(plan)] == [Grade.OK]
    file = graph(tmp_path)
    file.write_text(file.read_text().replace("demo", "nobody/nothing-of-the-kind"))
    (unknown,) = doctor.check_graph(make_plan(load(file, {}), machine(), env={}))
    assert (unknown.grade, unknown.text) == (Grade.WARN, "it cannot be said whether it fits")


def test_a_busy_port_and_a_state_directory_that_cannot_be_used_fail(tmp_path: Path) -> None:
    plan = make_plan(load(graph(tmp_path), {}), machine(), env={})
    assert plan.config.frontend is not None
    with socket.create_server(("127.0.0.1", plan.config.frontend.port)):
        (busy,) = refusals(plan)
    assert f"Port {plan.config.frontend.port} on 127.0.0.1 is held by" in busy
    (tmp_path / "state").write_text("a file")
    (unusable,) = refusals(plan)
    assert unusable == f"The state directory {tmp_path / 'state'} cannot be written (Graph: state-dir)."


def test_ports_of_the_running_graph_of_this_file_are_its_own(tmp_path: Path) -> None:
    file = graph(tmp_path)
    plan = make_plan(load(file, {}), machine(), env={})
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


async def test_a_wrong_clock_is_a_warning(nats_url: str) -> None:
    right = await doctor.check_clock(nats_url)
    assert right is not None
    assert right.grade is Grade.OK, right
    with clock.skewed(-40.0):
        wrong = await doctor.check_clock(nats_url)
    assert wrong is not None
    assert wrong.grade is Grade.WARN
    assert "40.0 s behind" in wrong.text
    assert await doctor.check_clock(None) is None
    assert await doctor.check_clock("nats://127.0.0.1:1") is None
