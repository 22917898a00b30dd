"""The checks of `pdserve doctor`, against real servers."""

import asyncio
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from subprocess import DEVNULL, PIPE, Popen

import httpx
import msgspec
import pytest

from pdserve.cli.find import GraphAddress, NoGraph, view_of
from pdserve.cli.operate import hosts
from pdserve.cli.operate.hosts import Finding, check_hosts, decoded
from pdserve.cli.operate.status import _states
from pdserve.cli.setup.credentials import make_credentials
from pdserve.cli.setup.doctor import check_etcd, check_graph, check_moment, check_nats
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.observe.problems import problems
from pdserve.observe.process_pages import serve_pages
from pdserve.plan.plan import Plan, make_plan
from pdserve.queue import server_info
from pdserve.registry import connect, etcd
from pdserve.registry.view import Snapshot
from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import Credentials, create
from pdserve.supervisor import state
from pdserve.supervisor.preflight import hold_ports
from pdserve.supervisor.preflight import refusals as refusals_now
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import ConfigError
from pdserve.util.net import free_port
from tests.conditions import until
from tests.full_disk import small_disk
from tests.plan.models import machine
from tests.servers import SmallEtcd, etcd_server, nats_server


async def of_etcd(address: str, credentials: Credentials | None = None) -> list[Finding]:
    config = Config(Path(), "", "", None, None, None, etcd=address, namespace=f"doctor-{os.getpid()}")
    return (await check_etcd(config, credentials))[0]


async def test_servers_that_do_not_answer_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 0.5)
    port = free_port("127.0.0.1")
    for finding in (
        *await check_nats(f"nats://127.0.0.1:{port}", None),
        *await of_etcd(f"127.0.0.1:{port}"),
    ):
        assert finding.grade == "fail"
        assert str(port) in finding.text
        assert "or correct Graph." in finding.text
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        port = hangs.getsockname()[1]
        (finding,) = await check_nats(f"nats://127.0.0.1:{port}", None)
    assert finding.text.startswith(f"NATS at nats://127.0.0.1:{port}: no answer: start it")


async def test_servers_that_are_no_cluster_fail(nats_url: str) -> None:
    alone, lost = await check_nats(f"{nats_url},nats://127.0.0.1:{free_port('127.0.0.1')}", None)
    assert (alone.grade, lost.grade) == ("fail", "fail")
    assert "belongs to no cluster" in alone.text


async def test_a_full_etcd_is_reported_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`doctor`, a worker that waits for etcd, and `status` on the machine of `serve` report the full database."""
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 1.0)
    full = "its database is full (alarm NOSPACE): make space by `etcdctl compact REVISION`"
    async with SmallEtcd(tmp_path) as server, TaskOwner() as tasks:
        await server.fill_up()
        (found,) = await of_etcd(server.url)
        assert found.text.startswith(f"etcd at {server.url} accepts no new process: {full}")
        assert (found.grade, "start it" in found.text) == ("fail", False)
        tasks.start(_joins(server.url), "a worker that starts")
        await until(lambda: f"etcd at {server.url} accepts no new process: {full}" in caplog.text)
        record = GraphRecord(os.getpid(), "f", "m", "pdserve", server.url, "nats://127.0.0.1:4222")
        with state.locked(tmp_path) as folder:
            folder.record(record)
            folder.server_changed("nats", "exit code 1: no memory")
            written = (tmp_path / "graph.json").read_bytes()
        (tmp_path / "graph.json").write_bytes(written)
        address = GraphAddress(server.url, "pdserve", state_dir=tmp_path)
        with pytest.raises(NoGraph, match=r"full \(alarm NOSPACE\).*disarm`\.$"):
            await view_of(address).__aenter__()
        (tmp_path / "known.json").write_bytes(msgspec.json.encode(Snapshot([], [], {}, {})))
        async with view_of(address) as view:
            about_etcd, about_nats = problems(await anext(_states(view, address)), [])
            assert about_etcd.text.startswith(f"etcd at {server.url} does not serve this command ({full}")
            assert about_nats.text.startswith(
                "NATS at 127.0.0.1:4222 does not serve the supervisor (exit code 1: no memory)"
            )


async def _joins(etcd: str) -> None:
    async with connect(etcd, "pdserve", patient=True):
        pass


async def test_the_documented_commands_make_room_in_a_full_etcd(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are those of docs/operations.md, with an address that the certificate does not name."""
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    block = page.partition("### A full etcd")[2].split("```")[1]
    commands = "\n".join(line.removeprefix("$ ") for line in block.splitlines()[1:])
    monkeypatch.setattr(SmallEtcd, "host", "127.0.0.2")
    async with SmallEtcd(tmp_path, credentials=credentials) as server:
        await server.fill_up()
        assert (await of_etcd(server.url, credentials))[0].grade == "fail"
        ours = {
            "/opt/pdserve/current/bin": str(Path(sys.executable).parent),
            "10.0.0.5:2379": server.url,
            "/etc/pdserve/credentials": str(credentials.folder),
        }
        for theirs, own in ours.items():
            assert theirs in commands
            commands = commands.replace(theirs, own)
        shell = await asyncio.create_subprocess_exec("bash", "-euc", commands, env={"PATH": os.defpath})
        assert await shell.wait() == 0
        assert (await of_etcd(server.url, credentials))[0].grade == "ok"


async def test_the_printed_commands_start_servers_of_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 10.0)
    make_credentials(made := tmp_path / "made")
    _, printed = capsys.readouterr().out.split("starts them again:\n")
    nats, client, peer = (str(free_port("127.0.0.1")) for _ in range(3))
    printed = printed.replace("port 4222", f"port {nats}").replace(":2379", f":{client}")
    peers = f" &\n etcd --listen-peer-urls http://127.0.0.1:{peer} "
    script = re.sub(r"\n *etcd ", peers, printed) + " wait\n"
    env = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "ADDRESS": "127.0.0.1"}
    shell = await asyncio.create_subprocess_exec(
        "bash", "-euc", script, cwd=tmp_path, env=env, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )
    try:
        await until(lambda: _answers(made, f"nats://127.0.0.1:{nats}", f"127.0.0.1:{client}"), 60)
        largest = (await server_info(f"nats://127.0.0.1:{nats}"))["max_payload"]
        assert largest == 8 << 20, "as large as of a NATS that `serve` starts"
    finally:
        os.killpg(shell.pid, SIGKILL)
        await shell.wait()


async def _answers(made: Path, nats: str, etcd: str) -> bool:
    found = [*await check_nats(nats, Credentials(made)), *await of_etcd(etcd, Credentials(made))]
    return all(finding.grade == "ok" for finding in found)


FOREIGN_ETCD = """
import asyncio, sys
from pathlib import Path
from tests.cli.test_doctor import of_etcd
from pdserve.registry import etcd
from pdserve.security.credentials import Credentials
etcd.CONNECT_TIMEOUT = 3.0
print(asyncio.run(of_etcd(sys.argv[1], Credentials(Path(sys.argv[2]))))[0].text)
"""
"""program that checks an etcd with credentials of another graph"""


async def test_servers_accept_only_their_own_credentials(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create(tmp_path / "other")
    async with (
        nats_server(tmp_path, credentials=credentials) as nats,
        etcd_server(tmp_path, credentials=credentials) as server,
    ):
        assert (await check_nats(nats.url, credentials))[0].grade == "ok"
        assert (await of_etcd(server.url, credentials))[0].grade == "ok"
        monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 3.0)
        for wrong in (*await check_nats(nats.url, other), *await of_etcd(server.url, other)):
            assert wrong.grade == "fail"
            assert "not of this graph's credentials" in wrong.text
        # in a process of its own: other tests load gRPC, which reads its log level only once
        arguments = "-c", FOREIGN_ETCD, server.url, str(other.folder)
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
    assert b"not of this graph's credentials" in out
    assert b"Handshake failed" not in err


async def hosts_of(*instances: Instance) -> list[Finding]:
    config = Config(Path(), "", "", None, None, None)
    records = [*map(encode_record, instances), b"of another version"]
    return [finding async for finding in check_hosts(Plan(config, machine(), (), ()), decoded(records))]


async def test_doctor_names_each_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "CONNECT_TIMEOUT", 0.5)
    nowhere = free_port("127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as silent,
        serve_pages("127.0.0.1") as pages,
    ):
        here, kv = listening.getsockname()[1], silent.getsockname()[1]
        found = await hosts_of(
            # TEST-NET-1: packets are dropped or have no route
            Instance("decode-1-cd", Role.DECODE, host="192.0.2.1", address="tls://192.0.2.1:5710"),
            Instance(
                "decode-0-ab",
                Role.DECODE,
                host="127.0.0.1",
                address=f"tcp://127.0.0.1:{here}",
                metrics=pages.metrics,
                kv=f"127.0.0.1:{nowhere}",
            ),
            Instance("prefill-0-gh", Role.PREFILL, host="127.0.0.1", kv=f"127.0.0.1:{kv}"),
            Instance("frontend-0-ef", Role.FRONTEND, address="http://127.0.0.1:1", host="127.0.0.1"),
        )
    reached, closed, unread, away = found
    assert reached.grade == "ok"
    assert (
        f"127.0.0.1 is reached at {httpx.URL(pages.metrics).port} (pages of decode-0), {here}" in reached.text
    )
    assert (closed.grade, away.grade) == ("fail", "fail")
    assert closed.text.startswith(f"127.0.0.1:{nowhere}, KV of decode-0-ab: refused")
    assert f"let 127.0.0.1 accept TCP {nowhere} from this host (PDSERVE_KV_PORT fixes" in closed.text
    assert away.text.startswith("192.0.2.1:5710, stream of decode-1-cd: ")
    assert (unread.grade, unread.subject) == ("fail", "KV")
    assert "does not answer within 3 s" in unread.text
    assert "UCX_TCP_PORT_RANGE" in unread.text


GRAPH = """\
Graph: {{kv-port: {kv_port}, state-dir: state}}
Frontend: {{port: {port}}}
VllmWorker: {{model: demo, block-size: 32}}
"""


def graph(folder: Path) -> Path:
    """Write a graph's file with free ports, and return its path."""
    port = free_port("127.0.0.1", 2)
    file = folder / "graph.yaml"
    file.write_text(GRAPH.format(port=port, kv_port=port + 1))
    return file


def plan_of(file: Path) -> Plan:
    return make_plan(load(file, {}), machine(), env={})


def refusals(plan: Plan) -> list[str]:
    return [finding.text for finding in (*check_graph(plan), *check_moment(plan)) if finding.grade == "fail"]


def test_a_graph_that_can_be_served_is_ok(tmp_path: Path) -> None:
    file = graph(tmp_path)
    assert [each.grade for each in (*check_graph(plan_of(file)), *check_moment(plan_of(file)))] == [
        "ok",
        "ok",
    ]
    file.write_text(file.read_text().replace("demo", "nobody/nothing-of-the-kind"))
    unknown, _note = check_graph(plan_of(file))
    assert unknown.grade == "warn"
    assert unknown.text.startswith("unknown whether it fits: nobody/nothing-of-the-kind is not in")


def test_a_state_directory_that_cannot_be_used_fails(tmp_path: Path) -> None:
    plan = plan_of(graph(tmp_path))
    (tmp_path / "state").write_text("a file")
    (unusable,) = refusals(plan)
    assert (
        unusable
        == f"The state directory {tmp_path / 'state'} cannot be written: set another Graph.state-dir."
    )


def test_busy_ports_fail_except_those_of_this_graph(tmp_path: Path) -> None:
    file = graph(tmp_path)
    plan = plan_of(file)
    role = Instance("decode-0-ab", Role.DECODE, host="127.0.0.1", pid=os.getpid())
    with socket.create_server(("127.0.0.1", plan.workers[0].slot.kv_port)):
        assert [finding.grade for finding in check_moment(plan)] == ["fail"]
        assert [finding.grade for finding in check_moment(plan, [role])] == ["ok"]
    record = GraphRecord(os.getpid(), str(file.resolve()), "demo", "pdserve", "", "")
    assert plan.config.frontend is not None
    with socket.create_server(("127.0.0.1", plan.config.frontend.port)):
        (busy,) = refusals(plan)
        assert f"Port {plan.config.frontend.port} on 127.0.0.1 (Frontend.port) is held by" in busy
        plan.config.state_dir.mkdir()
        state.write(plan.config.state_dir, record)
        assert refusals(plan) == []
        state.write(plan.config.state_dir, msgspec.structs.replace(record, config="/another.yaml"))
        (other,) = refusals(plan)
    assert other.startswith(
        f"Another graph runs on {plan.config.state_dir} (of /another.yaml, pid {os.getpid()})"
    )


def test_ports_of_an_unregistered_role_of_this_graph_are_ok(tmp_path: Path) -> None:
    plan = plan_of(file := graph(tmp_path))
    port = plan.workers[0].slot.kv_port
    listens = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); input()"
    for role, grade in (("decode", "ok"), ("else", "fail")):
        command = [sys.executable, "-c", listens, "pdserve", role, "-f", file.name]
        with Popen(command, stdin=PIPE, stdout=PIPE, cwd=tmp_path) as process:
            assert process.stdout is not None
            process.stdout.readline()
            grades = [finding.grade for finding in check_moment(plan)]
            process.kill()
        assert grades == [grade]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_starting_graph_claims_its_fixed_ports(tmp_path: Path, host: str) -> None:
    """No process listens yet. `doctor` and `plan` report the same conflict as `serve`."""
    plan = plan_of(graph(tmp_path))
    config, slots = plan.config, [worker.slot for worker in plan.workers]
    assert config.frontend is not None
    other = replace(config, frontend=replace(config.frontend, host=host))
    with hold_ports(config, slots):
        for key, theirs, of in (
            (r"Frontend\.port", other, []),
            (r"Graph\.kv-port, decode-0", replace(config, frontend=None), slots),
        ):
            with pytest.raises(ConfigError) as caught, hold_ports(theirs, of):
                pass
            (text,) = caught.value.problems
            assert re.search(rf" \({key}\) is held by another graph \(pid {os.getpid()}\): ", text)
            assert [said for _, said in refusals_now(theirs, of)] == [text]
        with hold_ports(replace(config, frontend=None), []):
            pass
    with hold_ports(other, slots):
        pass


def test_a_disk_without_space_for_etcd_is_refused_unless_etcd_runs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        plan = plan_of(graph(disk.path))
        (full,) = refusals(plan)
        assert re.match(
            rf"etcd needs 160 MiB on the disk of {disk.path}/state, where 1\d MiB are free: ", full
        )
        with pytest.raises(ConfigError, match="etcd needs"), hold_ports(plan.config, plan.slots):
            pass
        assert refusals(replace(plan, config=replace(plan.config, etcd="10.0.0.5:2379"))) == []
        plan.config.state_dir.mkdir()
        state.write(plan.config.state_dir, GraphRecord(os.getpid(), str(plan.config.path), "m", "p", "", ""))
        assert refusals(plan) == []
