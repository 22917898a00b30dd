import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pdserve.contract.records import Role, SlotState
from pdserve.process import signals
from pdserve.supervisor import roles
from pdserve.supervisor.processes import readiness, restarts
from pdserve.supervisor.processes.guardian import alive
from pdserve.supervisor.processes.restarts import CannotStart
from pdserve.supervisor.serve import _on_stop_signals
from tests.conditions import until
from tests.supervisor.fakes import QUICK, SERVE, UP, Graph, fake

CRASH = "import sys; print('the cause is here', file=sys.stderr); sys.exit(3)"
IGNORES_SIGTERM = f"""
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    {UP}
"""


async def test_the_supervisor_gives_up_with_the_cause(tmp_path: Path) -> None:
    specs = [fake(SERVE, Role.FRONTEND), fake(CRASH)]
    async with Graph(tmp_path, *specs, registered=False) as graph:
        with pytest.raises(CannotStart, match="failed to start 3 times in a row") as raised:
            await asyncio.wait_for(asyncio.shield(graph.running), 30)
    assert "decode-0 ended (exit code 3)" in str(raised.value)
    assert "the cause is here" in str(raised.value)
    assert graph.text.count("the cause is here") == 3
    assert not any(map(alive, graph.pids()))


STARTS_ONCE = f"""
    import os, pathlib, sys, time
    if pathlib.Path("%s").exists():
        print("no memory here", file=sys.stderr)
        sys.exit(1)
    pathlib.Path("%s").touch()
    {UP}
"""


async def test_a_role_that_was_ready_once_is_restarted_for_ever(tmp_path: Path) -> None:
    """Other roles continue meanwhile."""
    once = STARTS_ONCE % (tmp_path / "first", tmp_path / "first")
    async with Graph(tmp_path, fake(SERVE), fake(once, Role.PREFILL)) as graph:
        await graph.up(2)
        victim, other = reversed(_pids_by_role(graph))
        os.kill(victim, signal.SIGKILL)
        await until(lambda: graph.text.count("no memory here") > 2 * QUICK.failed_starts)
        assert alive(other)
        assert not graph.running.done()
        await until(lambda: _last_report(graph, "prefill-0").failed_starts > QUICK.failed_starts)
        said = _last_report(graph, "prefill-0")
        assert not said.ready
        assert said.restarts >= said.failed_starts
        assert said.end == "exit code 1"
        assert said.cause == "no memory here"
        assert "no memory" not in str(said), "a log line may contain private data"
        assert _last_report(graph, "decode-0").ready


SOCKET = f"""
    import os, time
    open(os.environ["VLLM_RPC_BASE_PATH"] + "/" + os.environ["PDSERVE_BOOT"], "w").close()
    {UP}
"""


async def test_sockets_of_a_killed_engine_are_removed_before_its_restart(tmp_path: Path) -> None:
    """Sockets of other roles stay until those roles end."""
    with TemporaryDirectory(dir="/tmp") as short:
        specs = [fake(SOCKET, index=index, VLLM_RPC_BASE_PATH=short) for index in range(2)]
        async with Graph(tmp_path, *specs) as graph:
            await graph.up(2)
            left = glob(f"{short}/sockets-*/*")
            os.kill(graph.pids()[0], signal.SIGKILL)
            await graph.up(3)
            now = glob(f"{short}/sockets-*/*")
            assert (len(left), len(now), len({*left} & {*now})) == (2, 2, 1)
        assert os.listdir(short) == []


async def test_a_graph_gets_ready_without_a_failing_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ready process of the same role shows that the configuration is right."""
    async with Graph(tmp_path, fake(SERVE), fake(CRASH, index=1)) as graph:
        await asyncio.wait_for(graph.ready.wait(), 30)
        assert "ready, but without decode-1" in caplog.text
        assert not graph.running.done()


@pytest.mark.parametrize("part", ["start", "end", "removal"])
async def test_an_error_about_a_role_does_not_end_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async with Graph(tmp_path, fake(SERVE), fake(SERVE, Role.PREFILL)) as graph:
        await asyncio.wait_for(graph.ready.wait(), 30)
        victim, other = _pids_by_role(graph)
        failed = 0

        def fail(*_: object, **__: object) -> None:
            nonlocal failed
            failed += 1
            raise ValueError("not expected")

        with monkeypatch.context() as patch:
            if part == "start":
                patch.setattr("pdserve.supervisor.roles.Child", fail)
            elif part == "end":  # as if no file descriptor were free
                patch.setattr("pdserve.supervisor.processes.child.end_group", fail)
            else:
                patch.setattr(graph.supervisor._instances, "remove", fail)
            os.kill(victim, signal.SIGKILL)
            await until(lambda: failed > 0)
        await until(lambda: len(graph.pids()) > 2)
        await until(
            lambda: _last_report(graph, "decode-0").ready and _last_report(graph, "decode-0").restarts > 0
        )
        assert alive(other)
        assert not graph.running.done()


async def test_an_error_of_the_summary_does_not_end_the_graph(tmp_path: Path) -> None:
    graph = Graph(tmp_path, fake(SERVE))
    shown = asyncio.Event()

    def fail(*_: object) -> None:
        shown.set()
        raise OSError("not expected")

    graph.on_ready = fail
    async with graph:
        await asyncio.wait_for(shown.wait(), 30)
        os.kill(graph.pids()[0], signal.SIGKILL)
        await until(lambda: len(graph.pids()) == 2)
        assert not graph.running.done()


DRAINS = f"""
    import os, signal, sys, time
    def stop(*_):
        print("began", flush=True)
        time.sleep(%g)
        print("ended", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    {UP}
"""


async def test_roles_are_stopped_in_waves(tmp_path: Path) -> None:
    """Each wave begins after the end of the wave before."""
    slots = [(Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1), (Role.FRONTEND, 0)]
    async with Graph(tmp_path, *(fake(DRAINS % 0.2, *slot) for slot in slots)) as graph:
        await graph.up(4)
    said = [line.split() for line in graph.text.splitlines() if line.endswith((": began", ": ended"))]
    order = ["frontend"] * 2 + ["decode"] * 4 + ["prefill"] * 2
    assert [words[2].partition("-")[0] for words in said] == order
    assert graph.running.exception() is None
    assert not any(map(alive, graph.pids()))


async def test_ready_roles_drain_before_the_graph_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that is killed at each start keeps the graph unready, while the others serve."""
    for module in (roles, restarts):
        monkeypatch.setattr(module, "LOADING_PATIENCE", 0.1)
    killed = fake("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", index=1)
    specs = [fake(DRAINS % 0.4, Role.FRONTEND), fake(DRAINS % 0), killed]
    async with Graph(tmp_path, *specs, policy=replace(QUICK, kills=1000)) as graph:
        await until(lambda: len({state.name for state in graph.reported if state.ready}) == 2)
        assert not graph.ready.is_set()
    assert graph.text.count(": ended") == 2


async def test_a_stopped_role_is_draining_until_it_has_ended(tmp_path: Path) -> None:
    async with Graph(tmp_path, fake(DRAINS % 0.2, Role.FRONTEND)) as graph:
        await graph.up()
    assert "draining" in {said.state for said in graph.reported}
    assert _last_report(graph, "frontend-0").failed_starts == 0


@pytest.mark.parametrize(
    ("stops", "patience"), [(1, 0.3), (2, 60)], ids=["after the deadline", "at the second stop"]
)
async def test_a_role_that_does_not_stop_is_killed(tmp_path: Path, stops: int, patience: float) -> None:
    async with Graph(tmp_path, fake(IGNORES_SIGTERM), patience=patience) as graph:
        await graph.up()
        for _ in range(stops):
            graph.supervisor.stop()
        await asyncio.wait_for(asyncio.shield(graph.running), 30)
    assert not alive(graph.pids()[0])


async def test_the_signals_of_one_stop_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` and a closed terminal send several signals. Two counted stops would end running requests."""
    stops: list[str] = []
    _on_stop_signals(partial(stops.append, "stop"))
    for apart, number, counted in (
        (60.0, signal.SIGTERM, 1),
        (60.0, signal.SIGTERM, 1),
        (0.0, signal.SIGHUP, 1),
        (0.0, signal.SIGTERM, 2),
    ):
        monkeypatch.setattr(signals, "SAME_STOP", apart)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)
        assert len(stops) == counted


async def test_a_stop_ends_the_wait_for_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = replace(QUICK, first=60, ceiling=60)
    async with Graph(tmp_path, fake(CRASH), policy=policy, registered=False) as graph:
        await until(lambda: "restarting it in 60" in caplog.text)
        graph.supervisor.stop()
        await asyncio.wait_for(asyncio.shield(graph.running), 30)


def _pids_by_role(graph: Graph) -> tuple[int, int]:
    """Return the pids of decode-0 and prefill-0."""
    words = (line.split() for line in graph.text.splitlines() if " up " in line)
    found = {each[2]: int(each[-2]) for each in words}
    return found["decode-0"], found["prefill-0"]


def _last_report(graph: Graph, name: str) -> SlotState:
    return [state for state in graph.reported if state.name == name][-1]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_role_that_is_missing_in_etcd_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """A healthy role finishes its requests; a hung role is killed."""
    monkeypatch.setattr(readiness, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(readiness, "MISSING", 0.1)
    async with Graph(tmp_path, fake(SERVE), patience=0.2 if hangs else 60) as graph:
        await graph.up()
        (role,) = graph.pids()
        if hangs:
            os.kill(role, signal.SIGSTOP)
        await graph.lease_ends(role)
        await until(lambda: len(graph.pids()) == 2)
        assert not alive(role)
        assert ("drained" in graph.text) is not hangs
        assert "decode-0 hangs: its process" in caplog.text
        assert "missing in etcd" in caplog.text
