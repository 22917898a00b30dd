"""Nothing that a killed supervisor started may be left."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.supervisor import state
from pdserve.supervisor.processes.exits import Guardian
from pdserve.supervisor.processes.guardian import RUN_VARIABLE, alive, stop_in_waves
from tests.conditions import holds, until

WAITS = "trap 'touch $0/told' TERM; touch $0/up; until [ -e $0/go ]; do sleep 0.02; done"


def _role(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a role that records SIGTERM in a file `told` and ends when there is a file `go`."""
    folder.mkdir()
    return _process("bash", "-c", WAITS, str(folder))


def _process(*command: str, run: str = "") -> "subprocess.Popen[bytes]":
    """Start a process in the first wave of a run."""
    env = {"PATH": os.environ["PATH"], RUN_VARIABLE: f"{run} 0"}
    return subprocess.Popen(command, process_group=0, env=env)


def _with_pid(pid: int) -> "subprocess.Popen[bytes]":
    """Start a process with this free pid."""
    for _ in range(1000):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = _process("sleep", "600")
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"no process got the pid {pid}")


async def test_the_successor_of_a_killed_guardian_knows_the_graph() -> None:
    process = _process("sleep", "600")
    with Guardian(patience=30) as guardian:
        guardian.watch(process.pid)
        keeping, first = asyncio.create_task(guardian.keep_running()), guardian.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: guardian.pid != first)
        keeping.cancel()
    assert process.wait(30) == -signal.SIGTERM, "stopped by the successor"


def test_the_next_graph_stops_leftovers_of_a_killed_guardian(tmp_path: Path) -> None:
    """The next graph spares processes of other graphs, even if its state directory is a copy of theirs. It first waits
    for a live guardian, which holds the lock while it stops the leftovers itself."""
    with state.locked(tmp_path) as folder:
        ours, stranger = _process("sleep", "600", run=folder.run), _process("sleep", "600", run="another")
        of_the_folder = (tmp_path / "lock").read_text()
    with state.locked(tmp_path) as copy:
        assert alive(ours.pid), "the supervisor of that run, this process, runs"
        guardian = subprocess.Popen(["sleep", "0.5"], pass_fds=(copy.lock,))
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "lock").write_text(of_the_folder.replace(str(os.getpid()), str(dead.pid)))
    with state.locked(tmp_path, patience=30):
        assert not alive(guardian.pid)
        assert not alive(ours.pid)
        assert alive(stranger.pid)
    stranger.kill()
    assert [each.wait() for each in (guardian, ours, stranger)] == [0, -signal.SIGTERM, -signal.SIGKILL]


async def test_a_wave_is_stopped_after_the_wave_before_has_ended(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("frontend", "decode")]
    roles = [_role(folder) for folder in folders]
    await until(lambda: all((folder / "up").exists() for folder in folders))
    waves = {role.pid: wave for wave, role in enumerate(roles)}
    stopping = asyncio.create_task(asyncio.to_thread(stop_in_waves, waves, 30))
    await until((folders[0] / "told").exists)
    await holds(lambda: not (folders[1] / "told").exists())
    (folders[0] / "go").touch()
    await until((folders[1] / "told").exists)
    (folders[1] / "go").touch()
    await stopping
    assert [role.wait() for role in roles] == [0, 0]


def test_a_process_with_a_reused_pid_is_not_stopped(tmp_path: Path) -> None:
    """A worker may end by itself while the frontends, which are stopped first, still drain. The test uses a pid
    namespace, so that no unrelated process takes the pid."""
    code = "import asyncio, pathlib, sys; from tests.supervisor.processes import test_killed as tests; "
    code += "asyncio.run(tests.stop_beside_a_stranger(pathlib.Path(sys.argv[1])))"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, str(tmp_path / "frontend")], env=env, stderr=subprocess.PIPE, text=True)
    if done.stderr.startswith("unshare:"):
        pytest.skip("needs root")
    assert done.returncode == 0, done.stderr


async def stop_beside_a_stranger(folder: Path) -> None:
    first, second = _role(folder), _process("sleep", "600")
    await until((folder / "up").exists)
    stopping = asyncio.create_task(asyncio.to_thread(stop_in_waves, {first.pid: 0, second.pid: 1}, 30))
    await until((folder / "told").exists)
    second.kill()
    second.wait()
    stranger = _with_pid(second.pid)
    try:
        (folder / "go").touch()
        await stopping
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        first.wait()
