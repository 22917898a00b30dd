"""A role without `serve`: run by hand, or by systemd, Slurm or Kubernetes, which decide on restarts (docs/hosts.md).
Its parent, a small process, forwards signals, kills a role that hangs, and removes what the role leaves behind."""

import ctypes
import faulthandler
import logging
import os
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from pdserve.process.signals import DRAINS, SERVES, STOPPERS
from pdserve.supervisor.processes.exits import adopt_orphans
from pdserve.supervisor.processes.guardian import kill

logger = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two checks of the role."""
HANGS_AFTER = 60.0
"""Seconds without a heartbeat after which a role is killed. The count begins at the first
heartbeat, because imports may take longer."""
_DUMP_STACKS = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
_FROM_TERMINAL = 0x80
"""`si_code` of a signal that the kernel sent, as for Ctrl-C."""
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Environment variable of vLLM: the folder for its sockets."""
_MAX_FOLDER = 107 - len("/pdserve-12345678/123e4567-e89b-12d3-a456-426614174000")
"""Maximum of bytes of the parent folder's path. The path of a socket has at most 107."""


def run_alone(role: Callable[[Callable[[bytes], None]], int]) -> int:
    """Run the role in a child, and return its exit code: 128 + n if signal n ended it, 1 if it hung. The role
    gets a function to call about once a second with a heartbeat. Call this in a process without threads."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPERS, signal.SIGCHLD})
    allow_many_files()
    adopt_orphans()
    folder, parent = "" if os.environ.get(SOCKETS_VARIABLE) else make_sockets_folder(), os.getpid()
    os.environ.setdefault(SOCKETS_VARIABLE, folder)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        os.set_blocking(writing, False)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            return 1
        faulthandler.register(_DUMP_STACKS)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return role(lambda beat: _send(writing, beat))
        finally:
            if folder and os.getppid() != parent:
                shutil.rmtree(folder, ignore_errors=True)
    os.close(writing)
    try:
        return _Parent(child, reading).watch()
    finally:
        for _ in kill(_descendants):
            time.sleep(0.02)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def allow_many_files() -> None:
    """Raise the limit of open files to the hard limit, also for children, because each stream is a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_sockets_folder(state_dir: str = "") -> str:
    """Make a private folder for the sockets of one role's engine: in the state directory, or else in the temporary
    folder, or else in /tmp. Its path must be short. Raises OSError."""
    for parent, prefix in ((state_dir, "sockets-"), (tempfile.gettempdir(), "pdserve-")):
        with suppress(OSError):
            if parent and len(os.fsencode(parent)) <= _MAX_FOLDER:
                return tempfile.mkdtemp(prefix=prefix, dir=parent)
    return tempfile.mkdtemp(prefix="pdserve-", dir="/tmp")


def _send(pipe: int, beat: bytes) -> None:
    with suppress(OSError):  # the parent was stopped or killed
        os.write(pipe, beat + b"\n")


class _Parent:
    def __init__(self, child: int, heartbeats: int) -> None:
        self._child = child
        self._heartbeats = heartbeats
        self._silent: float | None = None
        """Seconds since the last heartbeat; None before the first."""
        self._last = b""

    def watch(self) -> int:
        while (code := self._ended()) is None:
            info = signal.sigtimedwait({*STOPPERS, signal.SIGCHLD}, TICK)
            if info and info.si_signo in STOPPERS and not _child_has(info):
                os.kill(self._child, info.si_signo)
            if self._read_heartbeats() or self._silent is None:
                continue
            self._silent += TICK * (info is None)
            if self._silent >= HANGS_AFTER:
                return self._kill_hung()
        return code

    def _ended(self) -> int | None:
        """Reap ended processes; return the role's exit code once it has ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        return None

    def _read_heartbeats(self) -> bool:
        """Return whether heartbeats came since the last call. If so, report the role's state to systemd."""
        beats = set[bytes]()
        while select.select([self._heartbeats], [], [], 0)[0] and (
            read := os.read(self._heartbeats, 1 << 16)
        ):
            beats.update(read.splitlines())
        if not beats:
            return False
        self._silent = 0.0
        for beat, state in ((SERVES, "READY=1"), (DRAINS, "STOPPING=1")):
            if beat in beats and self._last != beat:
                self._last = beat
                _notify(state)
        _notify("WATCHDOG=1")
        return True

    def _kill_hung(self) -> int:
        logger.error("the role hangs: no heartbeat for %g s; killing it, its stacks follow", HANGS_AFTER)
        os.kill(self._child, _DUMP_STACKS)
        time.sleep(TICK)
        os.kill(self._child, signal.SIGKILL)
        return 1


def _child_has(info: signal.struct_siginfo) -> bool:
    """Whether the child got the signal too. Ctrl-C goes to the whole foreground group, SIGHUP to the session leader."""
    return info.si_code == _FROM_TERMINAL and info.si_signo != signal.SIGHUP


def _notify(state: str) -> None:
    """Report a state to systemd (Type=notify)."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to, suppress(OSError):
            to.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)


def _descendants() -> list[int]:
    """Reap ended children, and return the processes below this one."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [child.pid for child in psutil.Process().children(recursive=True)]
