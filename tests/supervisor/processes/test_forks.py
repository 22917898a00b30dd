"""The fork server, with small modules in place of vLLM; and what it may import of vLLM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.supervisor.processes.child import Child, Exit
from pdserve.supervisor.processes.exits import Guardian, adopt_orphans
from pdserve.supervisor.processes.forks import FRONTEND_MODULES, WORKER_MODULES, ForkServer
from pdserve.supervisor.processes.guardian import RUN_VARIABLE, alive, groups_of
from tests.conditions import until

STATE = "import os\npid = os.getpid()\n"
ROLE = """
import json, os, signal, sys, forked_state
print(json.dumps({
    "argv": sys.argv, "group": os.getpgid(0), "parent": os.getppid(), "imported by": forked_state.pid,
    "environment": dict(os.environ), "stdin": sys.stdin.read(), "name": __name__,
}), flush=True)
print("to stderr", file=sys.stderr, flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the modules of these tests, and let this process adopt orphans, as `serve` does."""
    (tmp_path / "forked_state.py").write_text(STATE)
    (tmp_path / "forked_role.py").write_text(ROLE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    adopt_orphans()
    return tmp_path


@asynccontextmanager
async def serving(
    *imports: str, guardian: Guardian | None = None, room: int = 1000, **env: str
) -> AsyncIterator[ForkServer]:
    server = ForkServer(imports or ("forked_state",), env, room, lambda _: None, guardian)
    try:
        await server.ready()
        yield server
    finally:
        await server.close()
    assert not alive(server.pid)


def role(server: ForkServer, lines: list[str], *words: str, guardian: Guardian | None = None) -> Child:
    command = [sys.executable, "-m", "forked_role", *words]
    env = {"COLOUR": "red", "LONG": "x" * 500}
    return Child("decode-0", command, lines.append, env=env, guardian=guardian, wave=2, fork=server.fork)


async def test_a_forked_child_is_as_a_started_one_and_shares_the_import() -> None:
    async with serving(COLOUR="green", ONLY="of the fork server") as server:
        lines: list[str] = []
        child = role(server, lines, "--index", "0")
        assert await child.wait() == Exit(7, tuple(lines))
    said = json.loads(lines[0])
    assert lines[1:] == ["to stderr"]
    assert said["imported by"] == server.pid
    assert (said["group"], said["parent"]) == (child.pid, os.getpid())
    assert said["argv"][1:] == ["--index", "0"]
    assert said["environment"] == {**os.environ, "COLOUR": "red", "LONG": "x" * 500}
    assert (said["stdin"], said["name"]) == ("", "__main__")


async def test_proc_shows_the_command_and_the_environment_of_a_forked_child() -> None:
    """The next supervisor finds a child by its mark, `doctor` by its variables, an operator by its arguments."""
    with Guardian(1, run=f"run-{os.getpid()}") as guardian:
        async with serving(guardian=guardian, ONLY="of the fork server") as server:
            lines: list[str] = []
            child = role(server, lines, "wait", guardian=guardian)
            await until(lambda: len(lines) == 2)
            process = psutil.Process(child.pid)
            assert " ".join(process.cmdline()).strip() == f"{sys.executable} -m forked_role wait"
            shown = process.environ()
            assert shown == {
                **os.environ,
                "COLOUR": "red",
                "LONG": "x" * 500,
                RUN_VARIABLE: f"{guardian.run} 2",
            }
            assert groups_of(guardian.run)[child.pid] == 2
            child.kill()
            assert (await child.wait()).code == -signal.SIGKILL


async def test_an_environment_that_does_not_fit_into_proc_reaches_the_child_whole() -> None:
    with Guardian(1, run=f"run-{os.getpid()}") as guardian:
        async with serving(guardian=guardian) as server:
            lines: list[str] = []
            command = [sys.executable, "-m", "forked_role", "wait"]
            env = {"LARGE": "x" * 60_000}
            child = Child("role", command, lines.append, env=env, guardian=guardian, fork=server.fork)
            await until(lambda: len(lines) == 2)
            assert json.loads(lines[0])["environment"]["LARGE"] == env["LARGE"]
            assert child.pid in groups_of(guardian.run)
            child.kill()
            await child.wait()


@pytest.mark.parametrize("failure", ["import", "killed", "stopped", "upgraded"])
async def test_without_the_fork_server_a_child_starts_by_itself(
    failure: str, modules: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.supervisor.processes.forks.FORK_WITHIN", 0.5)
    if failure == "import":
        (modules / "forked_state.py").write_text(
            f"import sys\nif 'forked_role' not in str(sys.orig_argv): 1 / 0\n{STATE}"
        )
    async with serving() as server:
        if failure == "killed":
            os.kill(server.pid, signal.SIGKILL)
        elif failure == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        elif failure == "upgraded":
            (modules / "new").write_text(STATE)
            (modules / "new").replace(modules / "forked_state.py")
        for _ in range(2):
            lines: list[str] = []
            child = role(server, lines)
            assert (await child.wait()).code == 7
            assert json.loads(lines[0])["imported by"] == child.pid
    assert caplog.text.count("fork server failed") == 1
    assert ("ZeroDivisionError" in caplog.text) == (failure == "import")


SUPERVISOR = """
import asyncio, signal, sys
from pdserve.supervisor.processes.child import Child
from pdserve.supervisor.processes.exits import adopt_orphans
from pdserve.supervisor.processes.forks import ForkServer
async def main():
    adopt_orphans()
    server = ForkServer(["forked_state"], {}, 1000, print)
    await server.ready()
    command = [sys.executable, "-m", "forked_role", "wait"]
    child = Child("role", command, lambda line: None, parent_death=signal.SIGTERM, fork=server.fork)
    print(server.pid, child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_fork_server_and_its_children_notice_the_death_of_the_supervisor() -> None:
    starting = asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISOR, stdout=subprocess.PIPE)
    supervisor = await starting
    assert supervisor.stdout is not None
    pids = [int(word) for word in (await supervisor.stdout.readline()).split()]
    assert [alive(pid) for pid in pids] == [True, True]
    supervisor.kill()
    await supervisor.wait()
    await until(lambda: not any(map(alive, pids)))


def test_the_imports_are_those_of_the_roles_and_have_no_state_of_a_process() -> None:
    """Few modules of vLLM are left for the roles to import, no thread runs that a fork would lose, and no module of
    pdserve with random names, metrics or start times is imported."""
    script = f"""
import json, os, sys
for name in {[*WORKER_MODULES, *FRONTEND_MODULES]}:
    __import__(name)
ours = [name for name in sys.modules if name.startswith("pdserve")]
threads, before = len(os.listdir("/proc/self/task")), set(sys.modules)
import pdserve.engine.vllm.engine, pdserve.frontend.model.processor
left = [name for name in sys.modules if name.startswith("vllm.") and name not in before]
print(json.dumps([ours, threads, left]))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    ours, threads, left = json.loads(done.stdout.splitlines()[-1])
    assert ours == ["pdserve", "pdserve.engine", "pdserve.engine.vllm", "pdserve.engine.vllm.api"]
    assert threads == 1
    assert len(left) < 20, left
