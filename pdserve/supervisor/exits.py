"""Wait for the end of processes, and end what is left of a process group."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Collection

from pdserve.supervisor.guardian import TRACKER_PATIENCE, is_tracker, members, release, send, shared_memory

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


def dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Make a `preexec_fn` by which the child gets this signal when its parent dies. Call it in the parent's main
    thread."""
    parent = os.getpid()

    def in_child() -> None:
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)  # the parent died between fork and prctl

    return in_child


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that `end_group` can reap them: in a container, process
    1 may not."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def exit_of(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a child's end; return its exit code, negative for a signal. A pidfd works under every event loop,
    without child watchers or threads, and whatever process holds the child's pipes."""
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
    """Kill what is left of a process group whose leader is gone, and return when nothing is. Then remove the shared
    memory of the killed processes, and `memory`, segments that were known before.

    multiprocessing's resource tracker removes the shared memory of killed processes and ends by itself when they are
    gone, so it is only killed after `TRACKER_PATIENCE`.
    """
    left = members(group)
    memory = shared_memory(left) | set(memory)
    send((pid for pid in left if not is_tracker(pid)), signal.SIGKILL)
    loop = asyncio.get_running_loop()
    started = loop.time()
    while _exists(group):
        if loop.time() > started + 2 * TRACKER_PATIENCE:
            log.warning("process group %d does not end", group)  # a zombie of another parent, or stuck in I/O
            break
        if loop.time() > started + TRACKER_PATIENCE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        await asyncio.sleep(0.01)
    release(memory)


def _exists(group: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
