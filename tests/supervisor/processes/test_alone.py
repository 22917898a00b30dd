"""The parent process of a role that runs without `serve`."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from pdserve.process.signals import DRAINS, SERVES, STARTS
from pdserve.supervisor.processes import alone
from tests.conditions import until
from tests.terminal import Terminal

HEAD = """
import os, signal, sys, time
from multiprocessing import shared_memory
from pdserve.observe import logs
from pdserve.supervisor.processes import alone
alone.TICK = 0.1
logs.setup("decode-0", "INFO", "text", "WARNING")

def say(text):
    print(text, flush=True)

def role(beat):
"""
TAIL = "\nalone.HANGS_AFTER = float(os.environ.get('HANGS_AFTER', 60))\nsys.exit(alone.run_alone(role))\n"
ENDS_AT_SIGNAL = """
    def stopped(number, _):
        say(f"got {signal.Signals(number).name}")
        ended.append(number)
    ended = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    say(f"role {os.getpid()} {os.environ['VLLM_RPC_BASE_PATH']}")
    while not ended:
        beat(b"serves")
        time.sleep(0.05)
    time.sleep(0.3)  # a second signal would come meanwhile
    say("drained")
    return 0
"""
LEAVES_FILES = """
    import multiprocessing
    memory = shared_memory.SharedMemory(create=True, size=1 << 12)
    engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    engine.start()
    open(os.environ["VLLM_RPC_BASE_PATH"] + "/socket", "w").close()
    say(f"role {os.getpid()} {engine.pid} {memory._name.strip('/')} {os.environ['VLLM_RPC_BASE_PATH']}")
    beat(b"serves")
    time.sleep(600)
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "VLLM_RPC_BASE_PATH"}


@contextmanager
def running(role: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + role + TAIL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**_environment(), **env},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_words(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_paths_of_sockets_are_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of state directory and temporary folder may be long, and the state directory may be missing."""
    with TemporaryDirectory(dir="/tmp") as short:
        long = Path(short, "a-long-name" * 5)
        long.mkdir()
        for state_dir, temp, above in (
            (short, str(long), short),
            (str(long), short, short),
            (f"{short}/missing", short, short),
            (str(long), str(long), "/tmp"),
        ):
            monkeypatch.setattr(tempfile, "tempdir", temp)
            folder = Path(alone.make_sockets_folder(state_dir))
            assert (str(folder.parent), folder.stat().st_mode & 0o777) == (above, 0o700)
            with socket.socket(socket.AF_UNIX) as longest:
                longest.bind(str(folder / "123e4567-e89b-12d3-a456-426614174000"))
            shutil.rmtree(folder)


async def test_the_role_gets_one_signal_for_ctrl_c() -> None:
    """The terminal sends SIGINT to role and parent."""
    with Terminal([sys.executable, "-c", HEAD + ENDS_AT_SIGNAL + TAIL], _environment()) as terminal:
        await asyncio.to_thread(terminal.until, "role ")
        terminal.type("\x03")
        await asyncio.to_thread(terminal.until, "the exit code is 0")
    assert terminal.text.count("got SIGINT") == 1


@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_or_hung_role_leaves_nothing_behind(killed: bool) -> None:
    with running(LEAVES_FILES, HANGS_AFTER="60" if killed else "1") as process:
        _, pid, engine, memory, folder = next_words(process)
        if killed:
            os.kill(int(pid), signal.SIGKILL)
        assert process.wait(30) == (137 if killed else 1)
        assert not psutil.pid_exists(int(pid))
        assert not psutil.pid_exists(int(engine))
        assert not Path("/dev/shm", memory).exists()
        assert not Path(folder).exists()
        assert process.stderr is not None
        said = process.stderr.read()
        assert ("no heartbeat" in said) != killed
        assert ("in role" in said) != killed, "the stack of the hung role"


async def test_a_role_drains_when_its_parent_is_killed() -> None:
    with running(ENDS_AT_SIGNAL) as process:
        _, pid, folder = next_words(process)
        process.kill()
        assert await asyncio.to_thread(next_words, process) == ["got", "SIGTERM"]
        await until(lambda: not Path(folder).exists())
        await until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie")


def test_systemd_gets_readiness_stopping_and_heartbeats(tmp_path: Path) -> None:
    signs = "".join(f"    beat({sign!r})\n    time.sleep(0.3)\n" for sign in (STARTS, SERVES, SERVES, DRAINS))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        with running(signs + "    return 0", NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert process.wait(30) == 0
        systemd.setblocking(False)
        states = list[str]()
        with suppress(BlockingIOError):
            while True:
                states.append(systemd.recv(100).decode())
    assert [state for state in states if state != "WATCHDOG=1"] == ["READY=1", "STOPPING=1"]
    assert "WATCHDOG=1" in states
