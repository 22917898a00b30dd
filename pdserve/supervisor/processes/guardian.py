"""A small process that stops the graph when the supervisor was killed.

It runs as a script, with the standard library alone, and reads `+GROUP WAVE` and `-GROUP` (process groups) line by line
from stdin. When stdin ends, the supervisor has ended. Then it stops the groups that are still listed, wave by wave like
the supervisor, so that running requests can finish: SIGTERM, and SIGKILL after the wave's patience.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

SERVERS = 99
"""Wave of the servers: after all roles."""
SERVERS_PATIENCE = 5.0
"""Seconds for a server to stop."""
RUN_VARIABLE = "PDSERVE_RUN"
"""Environment variable of each process of a graph: the mark of this run of the graph, and the wave of the process."""
TRACKER_PATIENCE = 2.0
"""Seconds for multiprocessing's resource tracker to remove the shared memory of killed processes."""
_SHARED = re.compile(r" (/dev/shm/(?:psm|vllm)_\S+)$", re.MULTILINE)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, int] = {}
    for line in sys.stdin:
        group, _, wave = line[1:].partition(" ")
        if line[0] == "+":
            groups[int(group)] = int(wave)
        else:
            groups.pop(int(group), None)
    stop_in_waves(groups, float(sys.argv[1]))


def stop_in_waves(groups: Mapping[int, int], patience: float) -> None:
    """Stop process groups (wave by group), lower waves first. Each wave of roles gets `patience` seconds."""
    began = {group: _stat(group)[2] for group in groups}
    for wave in sorted(set(groups.values())):
        allowed = SERVERS_PATIENCE if wave == SERVERS else patience
        stop({group: began[group] for group, of in groups.items() if of == wave}, allowed)


def stop(groups: Mapping[int, int], patience: float) -> None:
    """Send SIGTERM to the leaders of the groups, which stop their descendants themselves. Kill the rest of the groups
    when all leaders have ended, or after `patience` seconds. `groups` has the start time of each leader, because the
    pid of an ended leader may be another process's."""

    def left() -> list[int]:
        return [group for group, began in groups.items() if _stat(group)[2] in (began, 0)]

    send(left(), signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(alive(leader) for leader in left()):
        time.sleep(0.05)
    for _ in kill(lambda: [pid for group in left() for pid in members(group)]):
        time.sleep(0.05)


def kill(left: Callable[[], Collection[int]], memory: Collection[str] = ()) -> Iterator[None]:
    """Kill the processes that `left` lists until it lists none, and yield between two calls of `left`. Then remove
    their shared memory segments, and those in `memory`.

    multiprocessing's resource tracker is killed only after `TRACKER_PATIENCE`, because it removes the shared memory of
    killed processes and then ends by itself. After twice that time, give up."""
    started, pids = time.monotonic(), left()
    segments = shared_memory(pids) | set(memory)
    while pids:
        waited = time.monotonic() - started
        if waited > 2 * TRACKER_PATIENCE:
            logging.getLogger(__name__).warning(
                "processes do not end after SIGKILL: %s", ", ".join(map(str, pids))
            )
            break
        send((pid for pid in pids if waited > TRACKER_PATIENCE or not is_tracker(pid)), signal.SIGKILL)
        yield
        pids = left()
    release(segments)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# from /proc


def alive(pid: int) -> bool:
    """Whether the process runs; false for a zombie, which process 1 of a container may never reap."""
    return _stat(pid)[0] not in "ZX"


def members(group: int) -> list[int]:
    """The live processes of a process group."""
    live = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            state, group_of, _ = _stat(int(name))
            if group_of == group and state not in "ZX":
                live.append(int(name))
    return live


def groups_of(run: str) -> dict[int, int]:
    """The process groups of a run of a graph, with their waves, found by the mark in `RUN_VARIABLE`."""
    groups = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/environ", "rb") as environ:
            for variable in environ.read().split(b"\0"):
                if variable.startswith(f"{RUN_VARIABLE}={run} ".encode()):
                    groups[os.getpgid(int(name))] = int(variable.split()[1])
    return groups


def start_time(pid: int) -> int:
    """Start time of a process in ticks since boot, which tells processes of one pid apart; 0: there is no process."""
    return _stat(pid)[2]


def _stat(pid: int) -> tuple[str, int, int]:
    """State, process group and start time (ticks since boot); `X` and zeros for a process that does not exist."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
        return fields[0], int(fields[2]), int(fields[19])
    return "X", 0, 0


def is_tracker(pid: int) -> bool:
    """Whether the process is multiprocessing's resource tracker."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"resource_tracker" in command.read()
    return False


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Paths of the shared memory segments of Python and vLLM that these processes have mapped."""
    segments: set[str] = set()
    for pid in pids:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps,
        ):
            segments.update(_SHARED.findall(maps.read()))
    return segments


def release(memory: Collection[str]) -> None:
    """Remove the segments that no process has mapped."""
    if left := {name for name in memory if os.path.exists(name)}:
        for name in left - shared_memory(int(pid) for pid in os.listdir("/proc") if pid.isdecimal()):
            with contextlib.suppress(OSError):
                os.unlink(name)


if __name__ == "__main__":
    main()
