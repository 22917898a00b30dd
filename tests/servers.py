"""Real servers for tests, on free ports."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from pdserve.registry import connect
from pdserve.security.credentials import Credentials
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.util.errors import RegistryUnavailable


def nats_server(state_dir: Path, port: int = 0, credentials: Credentials | None = None) -> EmbeddedNats:
    """`async with nats_server(tmp_path) as nats`; then `nats.url`, `kill(nats)`, `restart(nats)`."""
    return EmbeddedNats(state_dir, port, credentials=credentials)


def etcd_server(state_dir: Path, port: int = 0, credentials: Credentials | None = None) -> EmbeddedEtcd:
    return EmbeddedEtcd(state_dir, port, credentials=credentials)


class SmallEtcd(EmbeddedEtcd):
    """An etcd with a quota of 1 MiB."""

    def command(self) -> list[str]:
        flag = "--quota-backend-bytes="
        return [f"{flag}{1 << 20}" if word.startswith(flag) else word for word in super().command()]

    async def fill_up(self) -> None:
        """Write until etcd raises the alarm NOSPACE, then delete the keys; the alarm stays."""
        async with connect(self.url, "filler", self.credentials) as registry:
            keys: list[str] = []
            try:
                while True:
                    await registry.put(key := f"{len(keys)}", bytes(100_000), leased=False)
                    keys.append(key)
            except RegistryUnavailable:
                for key in keys:
                    await registry.delete(key)


@contextmanager
def running(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Run a server for session fixtures. An event loop of this function reads the server's output, because the tests'
    event loops end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def hung(server: EmbeddedServer) -> AsyncIterator[None]:
    """Stop the server's process: its port accepts connections, and nothing answers."""
    pid = pid_of(server)
    os.kill(pid, signal.SIGSTOP)
    while not _stopped(pid):  # noqa: ASYNC110 (the kernel has no event for it)
        await asyncio.sleep(0.001)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stopped(pid: int) -> bool:
    """Return whether all threads are stopped; the signal takes a moment."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state in "Tt" for state in states)


async def kill(server: EmbeddedServer) -> None:
    """Send SIGKILL; return when the process has ended."""
    os.kill(pid_of(server), signal.SIGKILL)
    assert server.child
    await server.child.wait()


@asynccontextmanager
async def killed(server: EmbeddedServer) -> AsyncIterator[None]:
    await kill(server)
    yield
    await restart(server)


async def restart(server: EmbeddedServer) -> None:
    """Stop the server if it runs, then start it on the same port and data."""
    await server.stop()
    await server.start()


def pid_of(server: EmbeddedServer) -> int:
    assert server.child
    return server.child.pid
