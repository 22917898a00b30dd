"""Wait for the exit of child processes, kill the rest of their process groups, and run the guardian, a small process
that stops the graph when the supervisor was killed."""

import asyncio
import contextlib
import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Collection
from typing import Self

import psutil

from pdserve.supervisor.processes import guardian
from pdserve.supervisor.processes.guardian import kill, members

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (a subreaper), so that `end_group` can reap them: in a
    container, process 1 may never do that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_tree(pid: int) -> set[int]:
    """The pids of a process and all its descendants; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return set()


async def wait_for_exit(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a child to exit; return its exit code, negative for a signal."""
    if process.poll() is None:
        loop, ended, pidfd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return process.wait()


async def end_group(group: int, memory: Collection[str] = ()) -> None:
    """Kill the rest of a process group whose leader has ended, wait for its end, and remove `memory` segments."""

    def left() -> list[int]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        return members(group)

    for _ in kill(left, memory):
        await asyncio.sleep(0.02)


class Guardian:
    """The supervisor's side of the guardian. Each wave of roles gets `patience` seconds to stop. `lock`:
    descriptor of the lock file, which the guardian holds until no process is left. `run` marks the watched processes,
    so that the next supervisor finds them if the guardian is killed too."""

    def __init__(self, patience: float, lock: int | None = None, run: str = "") -> None:
        self.run = run
        self._patience = patience
        self._lock = lock
        self._groups: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int, wave: int = 0) -> None:
        """Have the guardian stop this process group after the supervisor's death, lower waves first."""
        self._groups[group] = wave
        self._send(f"+{group} {wave}")

    def forget(self, group: int) -> None:
        self._groups.pop(group, None)
        self._send(f"-{group}")

    async def keep_running(self) -> None:
        """Restart the guardian whenever it ends; never returns."""
        while True:
            code = await wait_for_exit(self._process)
            logger.warning("guardian ended (exit code %s); restarting it", code)
            with contextlib.suppress(OSError):
                self._stdin.close()
            self._start()
            await asyncio.sleep(1)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(self._patience)],
            stdin=subprocess.PIPE,
            process_group=0,
            pass_fds=() if self._lock is None else (self._lock,),
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        for group, wave in self._groups.items():
            self._send(f"+{group} {wave}")

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the guardian was killed: its successor gets all groups
            self._stdin.write(f"{line}\n".encode())
            self._stdin.flush()
