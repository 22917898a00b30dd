"""The life of a server process that belongs to us: start, ready, watch, stop, restart."""

import asyncio
import fcntl
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

READY_WITHIN = 20.0
STOP_WITHIN = 5.0


class ServerProcess(ABC):
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
