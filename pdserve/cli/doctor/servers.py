"""Checks of NATS and etcd: those that are configured, or our own, started for a moment."""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from pdserve import queue
from pdserve.cli.doctor.finding import Finding, fail, ok, warn
from pdserve.clock import LARGE_SKEW
from pdserve.errors import ConfigError, QueueUnavailable, RegistryUnavailable
from pdserve.registry import connect
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer

PATIENCE = 5.0


async def nats(url: str | None) -> Finding:
    if url is None:
        return await _embedded("NATS", EmbeddedNats, _ask_nats)
    return await _ask_nats(url)


async def clocks(url: str | None) -> Finding | None:
    """This host's clock against that of the NATS server; None where that is this host's own, or away."""
    if url is None:
        return None
    try:
        async with asyncio.timeout(PATIENCE):
            skew = await queue.clock_skew(url)
    except (QueueUnavailable, TimeoutError):
        return None
    if skew is None:
        return warn("clock", f"NATS at {url} does not tell its time", "NATS 2.10 and later does.")
    text = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of NATS at {url}"
    if abs(skew) > LARGE_SKEW:
        return warn("clock", text, "set both by NTP: logs of different hosts cannot be compared.")
    return ok("clock", text)


async def etcd(address: str | None) -> Finding:
    if address is None:
        return await _embedded("etcd", EmbeddedEtcd, _ask_etcd)
    return await _ask_etcd(address)


async def _embedded(
    name: str, kind: Callable[[Path], EmbeddedServer], ask: Callable[[str], Awaitable[Finding]]
) -> Finding:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdserve-doctor-") as folder:
        try:
            async with kind(Path(folder)) as server:
                seconds = time.monotonic() - started
                finding = await ask(server.url)
        except ConfigError as error:
            return fail(name, str(error), "run `make install`, or configure a server of your own.")
    return Finding(
        finding.grade, name, f"embedded, starts in {seconds:.1f} s; {finding.text}", finding.advice
    )


async def _ask_nats(url: str) -> Finding:
    """A NATS server says who it is before anything else, to everybody."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 4222
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            info = json.loads((await reader.readline()).removeprefix(b"INFO "))
            writer.close()
    except (OSError, ValueError) as error:
        return fail("NATS", f"{url}: {error or 'no answer'}", "start it, or correct Graph: nats.")
    if not info.get("jetstream"):
        return fail("NATS", f"{url}: no JetStream", "start nats-server with --jetstream.")
    return ok("NATS", f"{info.get('version')} at {url}, JetStream is on")


async def _ask_etcd(address: str) -> Finding:
    """A lease, a write and a read, in a namespace of this moment."""
    try:
        async with connect(address, f"pdserve-doctor-{uuid4().hex[:8]}") as registry:
            started = time.monotonic()
            await registry.put("probe", b"1")
            found = await registry.read("")
            milliseconds = (time.monotonic() - started) * 1000
    except RegistryUnavailable as error:
        return fail("etcd", str(error), "start it, or correct Graph: etcd.")
    if found != {"probe": b"1"}:
        return fail("etcd", f"{address}: what was written is not there", "check the server's health.")
    return ok("etcd", f"at {address}, a write and a read in {milliseconds:.0f} ms")
