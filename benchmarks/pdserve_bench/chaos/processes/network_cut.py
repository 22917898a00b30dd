"""Cut the network of a process group without firewall rules.

Every TCP connection between the group and other processes gets a socket filter at both ends that drops incoming data,
acknowledgements and resets, like a pulled cable. Listening sockets drop connection attempts. Later connections
are cut after about twenty milliseconds. Connections inside the group stay, as on a host without a network.
Shared memory between engines (UCX) cannot be cut, so start the graph with UCX_TLS=tcp.

Needs pidfd_getfd on the processes at both ends (root, or the same user if ptrace_scope allows it).
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import psutil

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(
    struct.pack("HBBI", 0x06, 0, 0, 0)
)  # BPF: return 0, the packet is dropped
_PROGRAM = struct.pack("HL", 1, ctypes.addressof(_DROP))
_POLL_INTERVAL = 0.02
_libc = ctypes.CDLL(None, use_errno=True)

Address = tuple[str, int]


class Cannot(Exception):
    """The fault is impossible here, and nothing was harmed; the text says why."""


@asynccontextmanager
async def cut_off(group: int, others: Iterable[int], port: int = 0) -> AsyncIterator["Cut"]:
    """Cut the group until the context exits. `others`: known processes at the far ends; this process is always
    included. With `port`, cut only connections to it, and let its listener accept none. If this raises Cannot, nothing
    stays cut."""
    cut = Cut(group, others, port)
    try:
        cut.extend()
        keeper = asyncio.create_task(cut.keep(), name="cut")
        try:
            yield cut
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    finally:
        cut.heal()


class Cut:
    def __init__(self, group: int, others: Iterable[int], port: int = 0) -> None:
        self._group = group
        self._port = port
        self._others = [os.getpid(), *others]
        self._members: list[int] = []
        self._known: set[tuple[int, str, str]] = set()
        self._sockets: dict[tuple[int, int, tuple[Address, Address | None]], socket.socket] = {}
        self._lock = threading.Lock()
        self._healed = False

    @property
    def connections(self) -> int:
        """Number of cut connection ends."""
        return sum(remote is not None for _, _, (_, remote) in list(self._sockets))

    async def keep(self) -> None:
        """Until cancelled, cut new connections. This happens in a thread, because this event loop measures pauses."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL)
            if _open_sockets(self._members) != self._known:
                with contextlib.suppress(Cannot):
                    await asyncio.to_thread(self.extend)

    def extend(self) -> None:
        """Cut connections that are not cut yet."""
        with self._lock:
            if not self._healed:
                self._extend()

    def _extend(self) -> None:
        self._members = [pid for pid in psutil.pids() if _group_of(pid) == self._group]
        self._known = _open_sockets(self._members)
        inside = [end for pid in self._members for end in _ends(pid)]
        own = {local for _, _, local, remote in inside if remote}
        fresh: set[Address] = set()
        for pid, fd, local, remote in inside:
            if self._port and (remote is None or remote[1] != self._port):
                continue
            if remote not in own and self._attach(pid, fd, (local, remote)) and remote:
                fresh.add(local)
        if fresh:
            for pid, fd, local, remote in (end for other in self._others for end in _ends(other)):
                if remote in fresh or (remote is None and local[1] == self._port):
                    self._attach(pid, fd, (local, remote))

    def _attach(self, pid: int, fd: int, which: tuple[Address, Address | None]) -> bool:
        if (pid, fd, which) in self._sockets:
            return False
        found = _duplicate(pid, fd)
        if found is None:
            return False
        self._sockets[pid, fd, which] = found
        try:
            found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
        except OSError as error:
            raise Cannot(
                f"the kernel cannot filter this socket ({error.strerror}): probably multipath TCP"
            ) from error
        return True

    def heal(self) -> None:
        with self._lock:  # the thread may still run
            self._healed = True
            for end in self._sockets.values():
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                end.close()
            self._sockets.clear()


def _open_sockets(pids: Iterable[int]) -> set[tuple[int, str, str]]:
    """Return open sockets by process and descriptor: a cheap check for new ones."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if (link := os.readlink(entry.path)).startswith("socket:"):
                        found.add((pid, entry.name, link))
    return found


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _ends(pid: int) -> Iterator[tuple[int, int, Address, Address | None]]:
    """Yield TCP sockets: pid, descriptor, local address, and remote address (None for a listener)."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise Cannot(f"cannot see the sockets of process {pid}: needs root") from error
    for end in found:
        if end.raddr:
            yield pid, end.fd, (end.laddr.ip, end.laddr.port), (end.raddr.ip, end.raddr.port)
        elif end.status == psutil.CONN_LISTEN:
            yield pid, end.fd, (end.laddr.ip, end.laddr.port), None


def _duplicate(pid: int, fd: int) -> socket.socket | None:
    """Return None if the process has ended or closed the descriptor."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        copy = _libc.syscall(_PIDFD_GETFD, handle, fd, 0)
    finally:
        os.close(handle)
    if copy >= 0:
        try:
            return socket.socket(fileno=copy)
        except OSError:  # the descriptor was reused
            os.close(copy)
            return None
    code = ctypes.get_errno()
    if code in (1, 38):  # EPERM, ENOSYS
        raise Cannot(f"cannot reach the sockets of process {pid} ({os.strerror(code)}): needs root")
    return None
