import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.records import Role, SlotState
from pdserve.supervisor import readiness, restarts, roles
from pdserve.supervisor.guardian import alive
from pdserve.supervisor.restarts import CannotStart
from tests.conditions import holds, until
from tests.supervisor.fakes import QUICK, SERVE, Graph, fake

CRASH = "import sys; print('the cause is here', file=sys.stderr); sys.exit(3)"
DEAF = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", os.getpid(), flush=True)
    time.sleep(600)
"""


async def test_ready_when_all_are_registered_and_nothing_left_after_stop(tmp_path: Path) -> None:
    specs = [fake(SERVE, Role.DECODE), fake(SERVE, Role.PREFILL), fake(SERVE, Role.FRONTEND)]
    async with Graph(tmp_path, *specs) as graph:
        await graph.up(3)
    assert not any(map(alive, graph.pids()))
    assert graph.running.exception() is None
    assert graph.text.count("drained") == 3


async def test_not_ready_before_it_is_in_the_registry(tmp_path: Path) -> None:
    async with Graph(tmp_path, fake(SERVE), registered=False) as graph:
        await until(lambda: len(graph.pids()) == 1)
        await holds(lambda: not graph.ready.is_set())


async def test_a_crashed_role_is_started_again_and_the_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Graph(tmp_path, fake(SERVE), fake(SERVE, Role.PREFILL)) as graph:
        await graph.up(2)
        victim, other = _pids_by_role(graph)
        os.kill(victim, signal.SIGSEGV)
        await until(lambda: len(graph.pids()) == 3)
        assert not alive(victim)
        assert alive(other)
        assert graph.removed == [victim]
        assert "killed by SIGSEGV" in caplog.text
        assert "starts again in 0.01 s" in caplog.text
    assert not any(map(alive, graph.pids()))


async def test_a_role_that_an_operator_stops_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling restart, by hand."""
    async with Graph(tmp_path, fake(SERVE)) as graph:
        await graph.up()
        os.kill(graph.pids()[0], signal.SIGTERM)
        await until(lambda: len(graph.pids()) == 2)
        assert "drained" in graph.text
        assert "decode-0 ended (exit code 0), starts again" in caplog.text
        assert graph.removed == [], "it took itself off"


async def test_gives_up_with_the_cause_and_stops_the_others(tmp_path: Path) -> None:
    specs = [fake(SERVE, Role.FRONTEND), fake(CRASH)]
    async with Graph(tmp_path, *specs, registered=False) as graph:
        with pytest.raises(CannotStart, match="failed to start 3 times in a row") as raised:
            await asyncio.wait_for(asyncio.shield(graph.running), 30)
    assert "decode-0 ended (exit code 3)" in str(raised.value)
    assert "the cause is here" in str(raised.value)
    assert graph.text.count("the cause is here") == 3
    assert not any(map(alive, graph.pids()))


STARTS_ONCE = """
    import os, pathlib, sys, time
    if pathlib.Path("%s").exists():
        print("no memory here", file=sys.stderr)
        sys.exit(1)
    pathlib.Path("%s").touch()
    print("up", os.getpid(), flush=True)
    time.sleep(600)
"""


async def test_a_role_that_does_not_start_again_is_tried_for_ever_and_reported(tmp_path: Path) -> None:
    """The others go on meanwhile."""
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
        assert "no memory" not in str(said), "a log line may name what is no other process's business"
        assert _last_report(graph, "decode-0").ready


async def test_ready_without_a_role_that_does_not_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sibling shows that it is not the configuration."""
    async with Graph(tmp_path, fake(SERVE), fake(CRASH, index=1)) as graph:
        await asyncio.wait_for(graph.ready.wait(), 30)
        assert "ready, but without decode-1" in caplog.text
        assert not graph.running.done()


async def test_a_role_that_cannot_even_be_forked_is_tried_again(tmp_path: Path) -> None:
    """As where the system has no memory for another process."""
    program = tmp_path / "program"
    spec = replace(fake(SERVE, Role.PREFILL), command=(str(program),))
    async with Graph(tmp_path, fake(SERVE), spec, policy=replace(QUICK, failed_starts=1000)) as graph:
        await until(lambda: len([state for state in graph.reported if state.restarts > 2]) > 0)
        program.write_text("#!/bin/sh\necho up $$\nexec sleep 600\n")
        program.chmod(0o755)
        await asyncio.wait_for(graph.ready.wait(), 30)


@pytest.mark.parametrize("part", ["start", "end", "removal"])
async def test_an_error_about_a_role_ends_no_graph(
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
            elif part == "end":  # as where no file descriptor is left
                patch.setattr("pdserve.supervisor.child.end_group", fail)
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


async def test_an_error_about_the_banner_ends_no_graph(tmp_path: Path) -> None:
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


async def test_stops_in_waves(tmp_path: Path) -> None:
    """Each role drains until it may end: no wave begins before the wave before is gone."""
    slow = """
        import os, pathlib, signal, sys, time
        def stop(*_):
            print("began", time.time(), flush=True)
            while not pathlib.Path("%s").exists():
                time.sleep(0.01)
            print("ended", time.time(), flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up", os.getpid(), flush=True)
        time.sleep(600)
    """
    waves = (Role.FRONTEND, Role.DECODE, Role.PREFILL)
    specs = [fake(slow % (tmp_path / role), role) for role in waves]
    async with Graph(tmp_path, *specs, fake(slow % (tmp_path / Role.DECODE), Role.DECODE, 1)) as graph:
        await graph.up(4)
        graph.supervisor.stop()
        for role, count in zip(waves, (1, 3, 4), strict=True):
            await until(lambda count=count: graph.text.count(": began ") == count)  # type: ignore[misc]
            (tmp_path / role).touch()
    began, ended = (_times(graph, word) for word in ("began", "ended"))
    assert ended["frontend-0"] < min(began["decode-0"], began["decode-1"])
    assert max(ended["decode-0"], ended["decode-1"]) < began["prefill-0"]


async def test_what_serves_before_all_is_ready_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that is killed whenever it starts keeps a graph from being ready for ever; the others serve."""
    for module in (roles, restarts):
        monkeypatch.setattr(module, "LOADING_PATIENCE", 0.2)
    drains = """
        import os, signal, sys, time
        def stop(*_):
            time.sleep(%g)
            print("drained", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up", os.getpid(), flush=True)
        time.sleep(600)
    """
    killed = fake("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", index=1)
    specs = [fake(drains % 0.7, Role.FRONTEND), fake(drains % 0), killed]
    async with Graph(tmp_path, *specs, policy=replace(QUICK, kills=1000)) as graph:
        await until(lambda: len({state.name for state in graph.reported if state.ready}) == 2)
        assert not graph.ready.is_set()
    assert graph.text.count("drained") == 2


@pytest.mark.parametrize(
    ("stops", "patience"), [(1, 0.3), (2, 60)], ids=["after the deadline", "at the second stop"]
)
async def test_a_role_that_does_not_stop_is_killed(tmp_path: Path, stops: int, patience: float) -> None:
    async with Graph(tmp_path, fake(DEAF), patience=patience) as graph:
        await graph.up()
        for _ in range(stops):
            graph.supervisor.stop()
        await asyncio.wait_for(asyncio.shield(graph.running), 30)
    assert not alive(graph.pids()[0])


async def test_stop_while_waiting_to_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = replace(QUICK, first=60, ceiling=60)
    async with Graph(tmp_path, fake(CRASH), policy=policy, registered=False) as graph:
        await until(lambda: "starts again in 60" in caplog.text)
        graph.supervisor.stop()
        await asyncio.wait_for(asyncio.shield(graph.running), 30)


def _pids_by_role(graph: Graph) -> tuple[int, int]:
    """(decode-0, prefill-0)"""
    found = {
        line.split()[2]: int(line.rsplit(" ", 1)[1]) for line in graph.text.splitlines() if " up " in line
    }
    return found["decode-0"], found["prefill-0"]


def _last_report(graph: Graph, name: str) -> SlotState:
    return [state for state in graph.reported if state.name == name][-1]


def _times(graph: Graph, word: str) -> dict[str, float]:
    lines = [line.split() for line in graph.text.splitlines() if f": {word} " in line]
    return {line[2]: float(line[-1]) for line in lines}


@pytest.fixture
def soon_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(readiness, "MISSING", 0.1)


@pytest.mark.usefixtures("soon_missing")
async def test_a_healthy_role_that_is_missing_in_etcd_for_long_finishes_its_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Graph(tmp_path, fake(SERVE), patience=60) as graph:
        await asyncio.wait_for(graph.ready.wait(), 30)
        await graph.lease_ends(graph.pids()[0])
        await until(lambda: len(graph.pids()) == 2)
        assert "drained" in graph.text
        assert "decode-0 ended (exit code 0)" in caplog.text
        assert "missing in etcd" in caplog.text


@pytest.mark.usefixtures("soon_missing")
async def test_a_role_whose_lease_is_over_for_long_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Graph(tmp_path, fake(DEAF), patience=0.2) as graph:
        await graph.up()
        os.kill(graph.pids()[0], signal.SIGSTOP)
        await graph.lease_ends(graph.pids()[0])
        await until(lambda: len(graph.pids()) == 2)
        assert not alive(graph.pids()[0])
        assert "decode-0 hangs" in caplog.text
        graph.supervisor.stop()
        graph.supervisor.stop()
