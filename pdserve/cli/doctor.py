"""`pdserve doctor`: why `serve` would refuse a file on this host, and which servers and peers it cannot reach."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from pdserve import queue
from pdserve.cli.options import DemoFile
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.credentials import Credentials
from pdserve.demo import FILE
from pdserve.errors import ConfigError, ProtocolError, QueueUnavailable, RegistryUnavailable
from pdserve.plan.machine import Machine
from pdserve.plan.plan import Plan, make_plan
from pdserve.records import decode_instance
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.supervisor.checks import busy_ports, running_graph

_WITHIN = 5.0
"""seconds for an answer"""


def doctor(file: DemoFile = FILE) -> int:
    """Check what the graph of FILE needs on this host: all for which `pdserve serve` would refuse it, the ports, and
    whether NATS, etcd and the processes on other hosts can be reached where the file names servers. Each line is ok,
    warn or fail, and says what to do. Exit code 1 where something failed.

    examples:
      pdserve doctor -f configs/disagg.yaml
      pdserve doctor -f configs/hosts.yaml      on each host, before and after the first one serves
    """
    return asyncio.run(_report(make_plan(load(file), Machine.detect())))


class Finding(NamedTuple):
    grade: str
    """ok, warn or fail"""
    subject: str
    text: str


async def _report(plan: Plan) -> int:
    """Print each finding as soon as it is made; return the exit code."""
    failed = False
    async for finding in checks(plan):
        failed |= finding.grade == "fail"
        print(f"{finding.grade:<5}{finding.subject:<6} {finding.text}", flush=True)
    return int(failed)


async def checks(plan: Plan) -> AsyncIterator[Finding]:
    for finding in (*check_graph(plan), *check_ports(plan)):
        yield finding
    try:
        credentials = Credentials.load(plan.config.security.credentials)
    except ConfigError:  # a problem of the plan
        return
    if plan.config.nats:
        yield await check_nats(plan.config.nats, credentials)
    if plan.config.etcd:
        async for finding in check_etcd(plan.config, credentials):
            yield finding


def check_graph(plan: Plan) -> Iterator[Finding]:
    yield from (Finding("fail", "graph", problem) for problem in plan.problems)
    if plan.fits:
        yield Finding("ok", "graph", f"{plan.config.path} fits this machine")
    elif plan.fits is None:
        yield Finding("warn", "graph", f"It cannot be said whether it fits: {plan.unknown}")
    yield from (Finding("warn", "graph", note) for note in plan.notes)


def check_ports(plan: Plan) -> Iterator[Finding]:
    """And the state directory. The ports of a running graph of this file are its own."""
    ours, problem = running_graph(plan.config)
    if problem:
        yield Finding("fail", "state", problem)
    try:
        problems = busy_ports(plan.config, plan.slots, ours)
    except ConfigError as error:
        problems = error.problems
    yield from (Finding("fail", "ports", problem) for problem in problems)
    if not problems:
        yield Finding("ok", "ports", "all are free" + ", or of the running graph" * bool(ours))


async def check_nats(url: str, credentials: Credentials | None) -> Finding:
    try:
        async with asyncio.timeout(_WITHIN):
            await queue.check(url, credentials)
    except ConfigError as error:
        return Finding("fail", "NATS", error.problems[0])
    except (QueueUnavailable, TimeoutError) as error:
        advice = "start it, or correct Graph.nats or Security.credentials."
        return Finding("fail", "NATS", f"{error or f'{url}: no answer'}: {advice}")
    return Finding("ok", "NATS", f"{url} answers, JetStream is on")


async def check_etcd(config: Config, credentials: Credentials | None) -> AsyncIterator[Finding]:
    """Take a lease and write; then reach each process that is registered."""
    assert config.etcd is not None
    try:
        async with connect(config.etcd, config.namespace, credentials) as registry:
            await registry.put(key := f"doctor/{uuid4().hex}", b"")
            await registry.delete(key)
            yield Finding("ok", "etcd", f"{config.etcd} answers")
            async for finding in check_peers(registry):
                yield finding
    except RegistryUnavailable as error:
        yield Finding("fail", "etcd", f"{error}: start it, or correct Graph.etcd or Security.credentials.")


async def check_peers(registry: Registry) -> AsyncIterator[Finding]:
    """Connect to the stream and the pages of each process, as frontends and decode workers do."""
    for value in (await registry.read(keys.INSTANCES)).values():
        try:
            instance = decode_instance(value)
        except ProtocolError:  # of another version
            continue
        for url in filter(None, (instance.address, instance.metrics)):
            host, port = urlsplit(url).hostname, urlsplit(url).port
            try:
                async with asyncio.timeout(_WITHIN):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                yield Finding("ok", "peers", f"{instance.id} is reached at {host}:{port}")
            except OSError as error:
                advice = "let a firewall pass it, or correct Graph.host on that host."
                yield Finding(
                    "fail", "peers", f"{instance.id} at {host}:{port}: {error or 'no answer'}: {advice}"
                )
