"""The supervisor itself is killed: nothing that it started may be left."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pdserve.supervisor import state
from pdserve.supervisor.embedded import EmbeddedNats
from pdserve.supervisor.guardian import alive, stop_in_waves
from tests.conditions import until


def start(script: str, log: Path, *args: str) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        command = [sys.executable, "-c", textwrap.dedent(script), *args]
        return subprocess.Popen(command, stdout=out, process_group=0)


WAVES = """
    import asyncio, os, subprocess, sys, textwrap
    from pdserve.supervisor.exits import Guardian
    from pdserve.supervisor.guardian import SERVERS

    ROLE = '''
        import signal, sys, time
        def stop(*_):
            print("began", sys.argv[1], flush=True)
            time.sleep(0.3)
            print("ended", sys.argv[1], flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up", sys.argv[1], flush=True)
        time.sleep(600)
    '''

    async def main():
        with Guardian(patience=30) as guardian:
            for name, wave in (("server", SERVERS), ("prefill", 2), ("decode", 1), ("frontend", 0)):
                role = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ROLE), name], process_group=0)
                guardian.watch(role.pid, wave)
            keeping = asyncio.create_task(guardian.keep())
            if "kill" in sys.argv:
                first = guardian.pid
                os.kill(first, 9)
                while guardian.pid == first:
                    await asyncio.sleep(0.01)
            print("watched", flush=True)
            await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("argument", ["", "kill"], ids=["", "the guardian was killed before"])
async def test_the_graph_of_a_killed_supervisor_stops_in_waves(tmp_path: Path, argument: str) -> None:
    log = tmp_path / "log"
    process = start(WAVES, log, argument)
    await until(lambda: log.read_text().count("up ") == 4 and "watched" in log.read_text())
    process.kill()
    process.wait()
    await until(lambda: log.read_text().count("ended") == 4)
    said = [line for line in log.read_text().splitlines() if "up" not in line and line != "watched"]
    order = ("frontend", "decode", "prefill", "server")
    assert said == [f"{word} {name}" for name in order for word in ("began", "ended")]


GRAPH = """
    import asyncio, os, subprocess, sys, textwrap
    from pathlib import Path
    from pdserve.process.signals import SUPERVISOR_DIED
    from pdserve.supervisor import state
    from pdserve.supervisor.child import Child
    from pdserve.supervisor.embedded import EmbeddedNats
    from pdserve.supervisor.exits import Guardian

    ROLE = '''
        import os, signal, subprocess, sys, time
        deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN)"
        deaf += "; print('up', os.getpid(), flush=True); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", deaf])
        def drain(*_):
            Path(sys.argv[1]).write_text("drained")
            sys.exit(0)
        from pathlib import Path
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, drain)
        print("up", os.getpid(), flush=True)
        time.sleep(600)
    '''

    async def main(folder):
        with state.locked(folder) as held, Guardian(30, held.lock, held.run) as guardian:
            nats = EmbeddedNats(folder, guardian=guardian)
            await nats.start()
            print("up", nats.child.pid, flush=True)
            command = [sys.executable, "-c", textwrap.dedent(ROLE), str(folder.parent / "drained")]
            show = lambda line: print(line, flush=True)
            Child("decode-0", command, show, guardian=guardian, parent_death=SUPERVISOR_DIED)
            print("guardian", guardian.pid, flush=True)
            await asyncio.sleep(600)

    asyncio.run(main(Path(sys.argv[1])))
"""


def _stranger(folder: Path) -> "subprocess.Popen[bytes]":
    """A process of another graph, though its folder is this one."""
    return subprocess.Popen(["sleep", "600"], cwd=folder, env={"PDSERVE_RUN": "another 0"})


async def test_a_supervisor_killed_with_its_guardian_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Roles get their time to drain, and what they leave is killed; a stranger in the same folder is not."""
    log, folder = tmp_path / "log", tmp_path / "state"
    process = start(GRAPH, log, str(folder))

    def pids(word: str) -> list[int]:
        return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(word)]

    await until(lambda: len(pids("up")) == 3 and len(pids("guardian")) == 1)
    stranger = _stranger(folder)
    for pid in (*pids("guardian"), process.pid):
        os.kill(pid, signal.SIGSTOP)  # neither sees the other's end
    for pid in (*pids("guardian"), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    try:
        assert all(map(alive, pids("up")))
        with state.locked(folder, patience=30):
            assert not any(map(alive, pids("up")))
            assert (tmp_path / "drained").read_text() == "drained"
            async with EmbeddedNats(folder) as nats:
                assert await nats.answers()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_copy_of_the_folder_of_a_running_graph_leaves_that_graph_alone(tmp_path: Path) -> None:
    log, folder, copy = tmp_path / "log", tmp_path / "state", tmp_path / "copy"
    process = start(GRAPH, log, str(folder))
    try:
        await until(lambda: log.read_text().count("up ") == 3)
        copy.mkdir()
        shutil.copy(folder / "lock", copy)
        with state.locked(copy, patience=30):
            pids = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("up")]
            assert all(map(alive, pids))
    finally:
        process.kill()
        process.wait()
        with state.locked(folder):  # when its guardian has stopped it
            pass


WAITS = "trap 'touch $0/told' TERM; touch $0/up; until [ -e $0/go ]; do sleep 0.02; done"


def _sleeper(*command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, process_group=0)


def _with_pid(pid: int) -> "subprocess.Popen[bytes]":
    """A process that has this pid, which is free."""
    for _ in range(1000):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            pytest.skip("needs root")
        process = _sleeper("sleep", "600")
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"no process got the pid {pid}")


async def test_a_process_that_got_the_pid_of_one_that_ended_is_not_stopped(tmp_path: Path) -> None:
    """As where a worker ends by itself while the frontends, which are stopped before it, still drain."""
    first, second = _sleeper("bash", "-c", WAITS, str(tmp_path)), _sleeper("sleep", "600")
    await until((tmp_path / "up").exists)
    stopping = asyncio.create_task(asyncio.to_thread(stop_in_waves, {first.pid: 0, second.pid: 1}, 30))
    await until((tmp_path / "told").exists)
    second.kill()
    second.wait()
    stranger = _with_pid(second.pid)
    try:
        (tmp_path / "go").touch()
        await stopping
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        first.wait()
