"""A role that runs alone: by hand, or under systemd, Slurm or Kubernetes. A small process stays above it and does what
`serve` does for its roles: it passes signals on, ends a role that hangs, and leaves nothing behind, however the role
ended. To start it again is for the manager, which goes by the exit code (docs/hosts.md)."""

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
"""seconds"""
HANGS_AFTER = 60.0
"""seconds without a sign of life after which a role counts as hung, in ticks that are counted, not measured: a process
that was stopped together with its role must not blame it. It begins with the first sign: imports take as long as they
take, and managers have a bound for the start"""
_SHOWS_ITS_THREADS = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
_FROM_TERMINAL = 0x80
"""`si_code` of a signal that the kernel sent to the whole foreground group"""
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""environment variable: the folder in which vLLM makes its sockets"""
_LONGEST = 107 - len("/pdserve-12345678/123e4567-e89b-12d3-a456-426614174000")
"""bytes of the folder above it: the path of a socket has 107 at most"""


def run_alone(role: Callable[[Callable[[bytes], None]], int]) -> int:
    """Run the role in a child and return its exit code, 128 + n where signal n ended it, 1 where it hung. It gets a
    function to call about once a second with a sign of life. Call it in a process without threads."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPERS, signal.SIGCHLD})
    allow_many_files()
    adopt_orphans()
    folder, parent = "" if os.environ.get(SOCKETS_VARIABLE) else make_sockets_folder(), os.getpid()
    os.environ.setdefault(SOCKETS_VARIABLE, folder)
    heard, shown = os.pipe()
    if (child := os.fork()) == 0:
        os.close(heard)
        os.set_blocking(shown, False)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            return 1
        faulthandler.register(_SHOWS_ITS_THREADS)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return role(lambda sign: _show(shown, sign))
        finally:
            if folder and os.getppid() != parent:
                shutil.rmtree(folder, ignore_errors=True)
    os.close(shown)
    try:
        return _Above(child, heard).watch()
    finally:
        for _ in kill(_left):
            time.sleep(0.02)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def allow_many_files() -> None:
    """Raise the limit of open files to the hard limit, since each stream is a socket; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_sockets_folder(state_dir: str = "") -> str:
    """Make a folder for the sockets of one role's engine, which only this user can enter: in the state directory, or in
    the temporary folder or /tmp where the paths would be too long, or the disk is full. Raises OSError."""
    for above, prefix in ((state_dir, "sockets-"), (tempfile.gettempdir(), "pdserve-")):
        with suppress(OSError):
            if above and len(os.fsencode(above)) <= _LONGEST:
                return tempfile.mkdtemp(prefix=prefix, dir=above)
    return tempfile.mkdtemp(prefix="pdserve-", dir="/tmp")


def _show(shown: int, sign: bytes) -> None:
    with suppress(OSError):  # the process above was stopped or killed
        os.write(shown, sign + b"\n")


class _Above:
    def __init__(self, child: int, heard: int) -> None:
        self._child, self._heard = child, heard
        self._silent: float | None = None
        """seconds since the last sign; None before the first"""
        self._last = b""

    def watch(self) -> int:
        while (code := self._ended()) is None:
            info = signal.sigtimedwait({*STOPPERS, signal.SIGCHLD}, TICK)
            if info and info.si_signo in STOPPERS and not _child_has(info):
                os.kill(self._child, info.si_signo)
            if self._listen() or self._silent is None:
                continue
            self._silent += TICK * (info is None)
            if self._silent >= HANGS_AFTER:
                return self._end_hung()
        return code

    def _ended(self) -> int | None:
        """Reap what has ended; return the role's exit code once it has."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        return None

    def _listen(self) -> bool:
        """Whether there were signs of life. Pass them on to systemd, if that is what started this."""
        signs = set[bytes]()
        while select.select([self._heard], [], [], 0)[0] and (read := os.read(self._heard, 1 << 16)):
            signs.update(read.splitlines())
        if not signs:
            return False
        self._silent = 0.0
        for sign, state in ((SERVES, "READY=1"), (DRAINS, "STOPPING=1")):
            if sign in signs and self._last != sign:
                self._last = sign
                _notify(state)
        _notify("WATCHDOG=1")
        return True

    def _end_hung(self) -> int:
        logger.error(
            "no sign of life for %g s: the role hangs and is killed; this is what it does", HANGS_AFTER
        )
        os.kill(self._child, _SHOWS_ITS_THREADS)
        time.sleep(TICK)
        os.kill(self._child, signal.SIGKILL)
        return 1


def _child_has(info: signal.struct_siginfo) -> bool:
    """Whether the kernel sent the signal to the child too, as Ctrl-C; a hang-up goes to the session's leader alone."""
    return info.si_code == _FROM_TERMINAL and info.si_signo != signal.SIGHUP


def _notify(state: str) -> None:
    """Send it to systemd, where that waits for it (Type=notify)."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to, suppress(OSError):
            to.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)


def _left() -> list[int]:
    """The processes below this one: what is left of the role. Zombies are reaped where they are its own."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [child.pid for child in psutil.Process().children(recursive=True)]
