"""A network of simulated hosts on this machine.

Each host is a set of Linux namespaces: an address on a bridge, process ids, hostname, /dev/shm, /tmp and monotonic
clock. This process is on the bridge as 10.77.0.1. Everything ends with this process: the kernel kills a host with its
first process, and interfaces vanish with their namespaces. Needs root, or `unshare --user --map-root-user`.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from pdserve.supervisor.processes.exits import wait_for_exit
from pdserve.util.errors import Unavailable
from pdserve.util.tied_child import tied_command
from pdserve_bench.hosts.cable import Cable, run

T = TypeVar("T")

SUBNET = "10.77.0"
BRIDGE = "hosts"
ADDRESS = "02:00:00:00:00:01"
"""The bridge's MAC address. Without one, the bridge takes a cable's and changes it when that cable vanishes."""
MONOTONIC = 1_000_003
"""Seconds between the monotonic clocks of successive hosts, so that they are not comparable."""
_CLONE_NEWNET = 0x40000000
_SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--time")
_FIRST = """
set -e
hostname "$0"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
n=0; for path; do n=$((n+1)); mkdir /dev/shm/$n; mount --bind "$path" /dev/shm/$n; done
mount -t tmpfs tmpfs /tmp
n=0; for path; do
  n=$((n+1)); mkdir -p "$path"; mount --bind /dev/shm/$n "$path"; umount /dev/shm/$n; rmdir /dev/shm/$n
done
ip link set lo up
echo ready
while :; do sleep infinity & wait; done
"""
"""A host's first process, which reaps orphans; its arguments are folders of /tmp shared by all hosts."""
_CLOCK = """
import sys, time
def _ahead():
    return 0 if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc") else {0}
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _ahead()
time.time_ns = lambda: _time_ns() + int(_ahead() * 10**9)
"""
"""`sitecustomize.py` of a host with a wrong clock: shifts Python's time of day by {0} seconds. Not for gRPC, because
it passes deadlines to C code, which reads the machine's clock."""
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def network(folder: Path) -> Iterator["Network"]:
    """Move this thread, and threads it starts, into a new network until the context exits. Call it before the process
    has gRPC threads. All hosts see `folder`. Raises Unavailable with the reason if not permitted."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    found = Network(folder)
    try:
        if _libc.unshare(_CLONE_NEWNET):
            why = os.strerror(ctypes.get_errno())
            raise Unavailable(
                f"no network namespace ({why}): run it as root, or below unshare --user --map-root-user --mount"
            )
        for line in (
            "ip link set lo up",
            f"ip link add {BRIDGE} address {ADDRESS} type bridge",
            f"ip addr add {SUBNET}.1/24 dev {BRIDGE}",
            f"ip link set {BRIDGE} up",
        ):
            run(line)
        yield found
    finally:
        found.close()
        _libc.setns(home, _CLONE_NEWNET)
        os.close(home)


class Network:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._numbers = iter(range(2, 255))
        self._thread = ThreadPoolExecutor(1)
        """A thread in the network's namespace. It lives until `close`, because the kernel kills a host when the thread
        that started it ends."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Run in a thread: changing links takes several commands, which would block the event loop and its clients."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def host(self, name: str, clock: float = 0.0) -> "Host":
        """Create a host. One of the same name vanishes first: that is a restart with the same folder and another
        address. `clock` is the offset in seconds of its Python processes' time of day."""
        return self._host(name, next(self._numbers), clock)

    def restart(self, name: str) -> "Host":
        """Restart a host at its address."""
        host = self.hosts[name]
        return self._host(name, host.number, host.clock)

    def remove(self, name: str) -> None:
        if host := self.hosts.pop(name, None):
            host.vanish()

    def _host(self, name: str, number: int, clock: float) -> "Host":
        self.remove(name)
        self.hosts[name] = host = Host(name, number, self.folder, clock)
        return host

    def close(self) -> None:
        for host in self.hosts.values():
            host.vanish()
        self.hosts.clear()
        self._thread.shutdown()


class Host:
    def __init__(self, name: str, number: int, folder: Path, clock: float) -> None:
        self.name, self.number, self.clock = name, number, clock
        self.address = f"{SUBNET}.{number}"
        self.folder = folder / name
        """The host's own state folder; other hosts see it too."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        shift = str(number * MONOTONIC)
        spaces = (*_SPACES, "--monotonic", shift, "--boottime", shift, "--fork", "--kill-child=SIGKILL")
        self._holder = subprocess.Popen(
            tied_command(["unshare", *spaces, "sh", "-c", _FIRST, name, *_shared(folder)], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        try:
            first = self._first()
            self._enter = ("nsenter", "--target", str(first), *_SPACES)
            self.link = Cable(f"host-{number}", first, self.address, SUBNET, BRIDGE)
        except BaseException:
            self._end()
            raise

    def _first(self) -> int:
        """Wait for the first process and return its pid on this machine. Raises Unavailable."""
        assert self._holder.stdout
        assert self._holder.stderr
        if self._holder.stdout.readline() != b"ready\n":
            raise Unavailable(f"cannot start a host: {self._holder.stderr.read().decode().strip()}")
        (first,) = psutil.Process(self._holder.pid).children()
        return int(first.pid)

    def start(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> "HostProcess":
        """Start a process on this host, in the caller's working directory."""
        env = {**os.environ, **(variables or {})}
        if self.clock:
            (self.folder / "sitecustomize.py").write_text(_CLOCK.format(self.clock))
            env["PYTHONPATH"] = os.pathsep.join([str(self.folder), env.get("PYTHONPATH", "")])
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self._enter, "env", "-C", os.getcwd(), *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        self._processes.append(process)
        return HostProcess(process)

    def processes(self) -> list[str]:
        """Return names of all processes but the first and its `sleep`."""
        (first,) = psutil.Process(self._holder.pid).children()
        return [name for child in first.children(recursive=True) if (name := child.name()) != "sleep"]

    def shared_memory(self) -> list[str]:
        """Return names of the files in its /dev/shm."""
        (first,) = psutil.Process(self._holder.pid).children()
        return [path.name for path in Path(f"/proc/{first.pid}/root/dev/shm").rglob("*")]

    def vanish(self) -> None:
        """Simulate a power loss: cut the link, kill all processes, and wait for their end."""
        self.link.remove()
        self._end()

    def _end(self) -> None:
        for process in psutil.Process(self._holder.pid).children() if self._holder.poll() is None else ():
            process.kill()  # this is the first process: the kernel kills the others with it
        self._holder.wait()
        for process in self._processes:
            process.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            assert pipe
            pipe.close()


class HostProcess:
    """A process on a host, seen from this machine."""

    def __init__(self, entering: "subprocess.Popen[bytes]") -> None:
        self._entering = entering

    @property
    def pid(self) -> int:
        """The pid on this machine (the host has another one); 0 unless running."""
        try:
            return next((child.pid for child in psutil.Process(self._entering.pid).children()), 0)
        except psutil.Error:
            return 0

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess.Popen`."""
        return self._entering.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._entering.wait(timeout)

    async def ended(self, within: float) -> int | None:
        """Wait for the end; None on timeout."""
        try:
            return await asyncio.wait_for(wait_for_exit(self._entering), within)
        except TimeoutError:
            return None

    def signal(self, number: signal.Signals) -> None:
        if pid := self.pid:
            os.kill(pid, number)


def _shared(folder: Path) -> list[str]:
    """Return paths that hosts must share although each has its own /tmp."""
    paths = (folder, Path.cwd(), Path(sys.prefix), Path(__file__).parents[3])
    return sorted({str(path.resolve()) for path in paths if path.resolve().is_relative_to("/tmp")})
