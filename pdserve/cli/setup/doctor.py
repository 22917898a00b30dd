"""`pdserve doctor`: finds why `serve` would refuse a file here, and which servers and hosts this host cannot reach."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Annotated
from uuid import uuid4

import typer

from pdserve import queue
from pdserve.cli.operate.hosts import Finding, check_hosts, decoded
from pdserve.cli.options import DemoFile
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.contract.records import Instance, Role
from pdserve.demo import FILE
from pdserve.plan.machine import Machine
from pdserve.plan.plan import Plan, make_plan
from pdserve.registry import connect, keys
from pdserve.security.credentials import Credentials
from pdserve.supervisor.preflight import refusals
from pdserve.supervisor.processes.exits import process_tree
from pdserve.util.errors import ConfigError, QueueUnavailable, RegistryUnavailable, error_text
from pdserve.util.net import split_servers, strip_passwords

_TIMEOUT = 5.0
"""Seconds for NATS to answer."""


def doctor(
    file: DemoFile = FILE,
    role: Annotated[
        list[Role] | None,
        typer.Option(metavar="ROLE", help="only one process of this role runs on this host; may be repeated"),
    ] = None,
) -> int:
    """Check what the graph of FILE needs on this host: everything that `pdserve serve` checks. If the file names
    servers, also check that this host reaches NATS, etcd and each port of the registered processes, and measure
    the bandwidth and latency of KV reads from up to 8 hosts. Each line is ok, warn or fail, and says what to do. Exit
    code 1 if a check failed.

    examples:
      pdserve doctor -f graph.yaml
      pdserve doctor -f graph.yaml --role prefill      on each host, before and after its process starts
    """
    plan = make_plan(load(file), Machine.detect(), roles=role or None, index=0 if role else None)
    if not plan.slots:
        raise ConfigError([f"{file} has no {' and no '.join(role or [])}: name another --role."])
    return asyncio.run(_report(plan))


async def _report(plan: Plan) -> int:
    failed = False
    async for finding in checks(plan):
        failed |= finding.grade == "fail"
        print(f"{finding.grade:<5}{finding.subject:<6} {finding.text}", flush=True)
    return int(failed)


async def checks(plan: Plan) -> AsyncIterator[Finding]:
    for finding in check_graph(plan):
        yield finding
    instances: list[Instance] = []
    with suppress(ConfigError):  # the plan reports credentials that cannot be loaded
        credentials = Credentials.load(plan.config.security.credentials)
        if plan.config.nats:
            for finding in await check_nats(plan.config.nats, credentials):
                yield finding
        if plan.config.etcd:
            findings, instances = await check_etcd(plan.config, credentials)
            for finding in findings:
                yield finding
    for finding in check_moment(plan, instances):
        yield finding
    async for finding in check_hosts(plan, instances):
        yield finding


def check_graph(plan: Plan) -> Iterator[Finding]:
    yield from (Finding("fail", "graph", problem) for problem in plan.problems)
    if plan.fits:
        yield Finding("ok", "graph", f"{plan.config.path} fits this machine")
    elif plan.fits is None:
        yield Finding("warn", "graph", f"unknown whether it fits: {plan.unknown}")
    yield from (Finding("warn", "graph", note) for note in plan.notes)


def check_moment(plan: Plan, instances: Iterable[Instance] = ()) -> Iterator[Finding]:
    """Check the state directory, the disk and the ports. Ports of this graph's running processes are fine."""
    local = (instance.pid for instance in instances if instance.host == plan.config.host)
    found = list(refusals(plan.config, plan.slots, {pid for each in local for pid in process_tree(each)}))
    yield from (Finding("fail", subject, text) for subject, text in found)
    if not any(subject == "ports" for subject, _ in found):
        yield Finding("ok", "ports", "all are free, or in use by this graph")


async def check_nats(urls: str, credentials: Credentials | None) -> list[Finding]:
    """Check each server. A failure is only a warning while most servers of a cluster answer."""
    servers = split_servers(urls)
    found = [await _check_nats(url, credentials, len(servers) > 1) for url in servers]
    serves = 2 * sum(each.grade == "ok" for each in found) > len(found)
    return [each._replace(grade="warn") if serves and each.grade == "fail" else each for each in found]


async def _check_nats(url: str, credentials: Credentials | None, of_cluster: bool) -> Finding:
    shown = strip_passwords(url)
    try:
        async with asyncio.timeout(_TIMEOUT):
            await queue.check(url, credentials, of_cluster)
    except ConfigError as error:
        return Finding("fail", "NATS", error.problems[0])
    except (QueueUnavailable, TimeoutError) as error:
        advice = "start it, or correct Graph.nats or Security.credentials."
        return Finding("fail", "NATS", f"{error_text(error, f'{shown}: no answer')}: {advice}")
    return Finding("ok", "NATS", f"{shown} answers, JetStream is enabled")


async def check_etcd(config: Config, credentials: Credentials | None) -> tuple[list[Finding], list[Instance]]:
    """Check that a lease and a key can be written; return also the registered processes."""
    assert config.etcd is not None
    registry = connect(config.etcd, config.namespace, credentials)
    try:
        async with registry:
            await registry.put(key := f"doctor/{uuid4().hex}", b"")
            await registry.delete(key)
            instances = decoded((await registry.read(keys.INSTANCES)).values())
    except RegistryUnavailable as error:
        advice = "" if registry.refusal else ": start it, or correct Graph.etcd or Security.credentials"
        return [Finding("fail", "etcd", f"{error}{advice}.")], []
    return [Finding("ok", "etcd", f"{config.etcd} answers")], instances
