"""The list of faults, the selection of victims, and the harm done to real processes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pdserve_bench.chaos.catalog import CLUSTER_FAULTS, FAULTS, HOST_FAULTS, choose
from pdserve_bench.chaos.inputs.features import count_running
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.processes.clocks import failures
from pdserve_bench.chaos.processes.faults import Harm, Target, Victim, find, injected
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.processes.restarts import kill_workers
from pdserve_bench.chaos.run import _played
from pdserve_bench.chaos.scene import Fault, Options, Scene
from pdserve_bench.client import Exchange
from pdserve_bench.graphs.launch import RunningGraph
from pdserve_bench.graphs.watch import GraphWatch

from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import ConfigError
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer
from tests.servers import pid_of, restart


def test_every_target_has_every_kind_of_fault() -> None:
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS)
    assert len(CLUSTER_FAULTS) == 15
    assert names >= {
        f"{target}-{kind}"
        for target in ("prefill", "decode", "nats", "etcd", "frontend")
        for kind in ("kill", "hang", "cut")
    }
    assert all(fault.description for fault in FAULTS)


LINKS = [f"{host}-link-cut-10s" for host in ("decode", "prefill")]
LEADERS = [f"etcd-leader-{how}" for how in ("kill", "hang", "cut")]


@pytest.mark.parametrize(
    ("faults", "only", "names"),
    [
        (FAULTS, "etcd-hang, decode-kill", ["etcd-hang", "decode-kill"]),
        (FAULTS, "nats-hang,nats", ["nats-hang", "nats-kill", "nats-cut", "nats-damage"]),
        (FAULTS, "drain", ["rolling", "frontend-drain"]),
        (FAULTS, "clock", ["clock-prefill", "clock-decode", "clock-frontend"]),
        (FAULTS, "cut", ["prefill-cut", "decode-cut", "nats-cut", "etcd-cut", "frontend-cut"]),
        (FAULTS, "", [fault.name for fault in FAULTS]),
        (HOST_FAULTS, "servers", ["servers-link-cut-10s", "servers-link-cut-60s", "servers-host-vanish"]),
        (HOST_FAULTS, "servers-link-cut-10s,10s", ["servers-link-cut-10s", *LINKS]),
        (HOST_FAULTS, "limit", ["loss-1%", "delay-50ms", "rate-1gbit"]),
        # no servers-host-restart: this fault means another address, and the servers keep theirs
        (HOST_FAULTS, "restart", ["decode-host-restart", "prefill-host-restart"]),
        (CLUSTER_FAULTS, "etcd-leader,majority", [*LEADERS, "nats-majority", "etcd-majority"]),
    ],
)
def test_choose(faults: tuple[Fault, ...], only: str, names: list[str]) -> None:
    assert [fault.name for fault in choose(only, faults=faults)] == names


def test_choose_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match="no fault decode-melt; there are: prefill-kill"):
        choose("decode-kill,decode-melt")


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Child processes that lead process groups."""
    command = [sys.executable, "-c", "input()"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) for _ in range(3)]
    yield [process.pid for process in processes]
    for process in processes:
        process.communicate()


@pytest.mark.parametrize(
    ("target", "turn", "rounds"),
    [
        (Target.DECODE, 0, [["decode-0"]]),
        (Target.DECODE, 1, [["decode-1"]]),
        (Target.DECODE, 2, [["decode-0"]]),
        (Target.ALL_DECODE, 1, [["decode-0", "decode-1"]]),
        (Target.ALL_PREFILL, 0, [["prefill-0"]]),
        (Target.WORKERS, 0, [["prefill-0"], ["decode-0"], ["decode-1"]]),
    ],
)
def test_only_children_of_the_supervisor_are_found(
    children: list[int], target: Target, turn: int, rounds: list[list[str]]
) -> None:
    instances = [
        Instance("decode-1", Role.DECODE, pid=children[0]),
        Instance("decode-0", Role.DECODE, pid=children[1]),
        Instance("prefill-0", Role.PREFILL, pid=children[2]),
        Instance("decode-of-another", Role.DECODE, pid=1),
        Instance("decode-of-another-host", Role.DECODE),
    ]
    found = find(target, turn, instances, os.getpid())
    assert [[victim.name for victim in victims] for victims in found] == rounds
    with pytest.raises(Cannot, match="no frontend process of this graph"):
        find(Target.FRONTEND, turn, instances, os.getpid())
    with pytest.raises(Cannot, match="of this graph on this machine"):
        find(target, turn, instances, os.getppid())


SERVE = """
import subprocess, sys
input()
server = subprocess.Popen([sys.argv[1], "60"], process_group=0)
print(server.pid, flush=True)
server.wait()
"""


def test_a_server_is_found_by_the_name_of_its_process(tmp_path: Path) -> None:
    program = shutil.copy("/bin/sleep", tmp_path / "nats-server")
    command, pipe = [sys.executable, "-c", SERVE, program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as serve:
        with pytest.raises(Cannot, match="nats is not one of this graph's servers"):
            find(Target.NATS, 0, [], serve.pid)
        print(file=serve.stdin, flush=True)
        assert serve.stdout is not None
        server = int(serve.stdout.readline())
        assert find(Target.NATS, 0, [], serve.pid) == [[Victim("nats", server)]]
        os.kill(server, signal.SIGKILL)


@pytest.fixture
def victims() -> Iterator[list[Victim]]:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    yield [Victim(f"decode-{number}", process.pid) for number, process in enumerate(processes)]
    for process in processes:
        process.kill()
        process.communicate()


def _all(victims: list[Victim], status: str) -> bool:
    return all(psutil.Process(victim.group).status() == status for victim in victims)


@pytest.mark.parametrize("harm", [Harm.KILL, Harm.DRAIN])
async def test_killed_and_drained_victims_end(victims: list[Victim], tmp_path: Path, harm: Harm) -> None:
    async with injected(harm, victims, os.getpid(), tmp_path):
        await until(lambda: _all(victims, psutil.STATUS_ZOMBIE))


CORE = """
import os, setproctitle, time
os.fork() or setproctitle.setproctitle("VLLM::EngineCore")
print(flush=True)
time.sleep(60)
"""


async def test_an_engine_core_is_killed_apart_from_its_worker(victims: list[Victim], tmp_path: Path) -> None:
    with pytest.raises(Cannot, match="decode-0 has no engine core below it"):
        async with injected(Harm.CORE_KILL, victims, os.getpid(), tmp_path):
            pass
    with subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE, process_group=0) as worker:  # noqa: ASYNC220
        assert worker.stdout is not None
        for _ in range(2):
            worker.stdout.readline()
        [core] = psutil.Process(worker.pid).children()
        async with injected(Harm.CORE_KILL, [Victim("decode-0", worker.pid)], os.getpid(), tmp_path):
            await until(lambda: core.status() == psutil.STATUS_ZOMBIE)
        assert worker.poll() is None
        worker.kill()


async def test_victims_hang_and_continue(victims: list[Victim], tmp_path: Path) -> None:
    async with injected(Harm.HANG, victims, os.getpid(), tmp_path):
        await until(lambda: _all(victims, psutil.STATUS_STOPPED))
    await until(lambda: _all(victims, psutil.STATUS_SLEEPING))


async def test_a_victim_that_has_ended_cannot_be_harmed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], process_group=0)  # noqa: ASYNC220
    process.wait()
    with pytest.raises(LookupError, match="decode-0 has ended by itself"):
        async with injected(Harm.KILL, [Victim("decode-0", process.pid)], os.getpid(), tmp_path):
            pass


@pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])
async def test_a_server_does_not_start_on_its_damaged_files(
    kind: type[EmbeddedServer], tmp_path: Path
) -> None:
    async with kind(tmp_path) as server:
        async with injected(Harm.DAMAGE, [Victim(kind.name, pid_of(server))], os.getpid(), tmp_path):
            assert server.child
            assert (await server.child.wait()).code == -9
        with pytest.raises(ConfigError):
            await restart(server)
        server.clear()
        await restart(server)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The scene of a fault in a graph without processes."""
    async with MemoryRegistry(MemoryServer()) as registry:
        watch, load = GraphWatch(), JudgedLoad("", "demo", iter(()), 1, 1)
        watch.registry = registry
        running = RunningGraph(GraphRecord(os.getpid(), "", "demo", "", "", ""), Path())
        config = Config(Path(), "demo", "demo", None, None, None)
        yield Scene(running, config, watch, load, Options((), hold=0.1), print, remote=False)


@pytest.mark.parametrize("error", [KeyError("status"), IndexError("pop"), LookupError("has ended by itself")])
async def test_a_failed_fault_is_bad_and_an_impossible_one_skipped(scene: Scene, error: Exception) -> None:
    """`Cannot` skips a fault, unless an earlier problem has made the fault bad."""
    raised = [error, Cannot("needs root"), Cannot("needs root")]

    async def play(_: Scene) -> float:
        raise raised.pop(0)

    fault = Fault("batch-kill", "", play)
    assert await _played(fault, scene) is not None
    assert scene.amiss == [f"the fault failed: {error!r}"]
    assert await _played(fault, scene) is not None, "counts because of the earlier problem"
    scene.amiss.clear()
    with pytest.raises(Cannot, match="needs root"):
        await _played(fault, scene)


async def test_a_fault_without_effect_is_bad(scene: Scene, victims: list[Victim], tmp_path: Path) -> None:
    """Without a connection, a cut is impossible (`Cannot`). Faults that were tried and harmed nothing are bad."""
    with pytest.raises(Cannot, match="decode-0 has no connection to cut"):
        async with injected(Harm.CUT, victims[:1], os.getpid(), tmp_path):
            pass
    count_running(scene, [Exchange({}, ended=1.0), Exchange({})])
    assert not scene.amiss
    count_running(scene, [Exchange({}, ended=1.0)])
    assert await kill_workers(scene) is not None
    await failures(replace(scene, remote=True), 1.0)
    assert scene.amiss == [
        "none of the feature's requests was in flight",
        "killed 0 workers, and 0 while they started",
        "0 of 0 remote prefills failed",
    ]
