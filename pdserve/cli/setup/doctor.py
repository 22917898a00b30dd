"""`pdserve doctor`: why `serve` would refuse a file on this host, and which servers and peers it cannot reach."""

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

_WITHIN = 5.0
"""seconds for an answer"""


def doctor(
    file: DemoFile = FILE,
    role: Annotated[
        list[Role] | None,
        typer.Option(
            metavar="ROLE", help="one process of this role alone runs on this host; again for another role"
        ),
    ] = None,
) -> int:
    """Check what the graph of FILE needs on this host: all for which `pdserve serve` would refuse it, the ports, and
    whether NATS, etcd and the processes on other hosts can be reached where the file names servers. What is closed is
    named by host and port; of each host's KV the bandwidth and latency are measured. Each line is ok, warn or fail, and
    says what to do. Exit code 1 where something failed.

    examples:
      pdserve doctor -f graph.yaml
      pdserve doctor -f graph.yaml --role prefill      on each host, before and after the first one serves
    """
    plan = make_plan(load(file), Machine.detect(), roles=role or None, index=0 if role else None)
    if not plan.slots:
        raise ConfigError([f"{file} has no {' and no '.join(role or [])}: name another --role."])
    return asyncio.run(_report(plan))


async def _report(plan: Plan) -> int:
    """Print each finding as soon as it is made; return the exit code."""
    failed = False
    async for finding in checks(plan):
        failed |= finding.grade == "fail"
        print(f"{finding.grade:<5}{finding.subject:<6} {finding.text}", flush=True)
    return int(failed)


async def checks(plan: Plan) -> AsyncIterator[Finding]:
    for finding in check_graph(plan):
        yield finding
    instances: list[Instance] = []
    with suppress(ConfigError):  # of the credentials: a problem of the plan
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
    """State directory, disk and ports."""
    here = (instance.pid for instance in instances if instance.host == plan.config.host)
    found = list(refusals(plan.config, plan.slots, {pid for each in here for pid in process_tree(each)}))
    yield from (Finding("fail", subject, text) for subject, text in found)
    if not any(subject == "ports" for subject, _ in found):
        yield Finding("ok", "ports", "all are free, or this graph's own")


async def check_nats(urls: str, credentials: Credentials | None) -> list[Finding]:
    """A cluster serves while most of its servers do."""
    servers = split_servers(urls)
    found = [await _check_nats(url, credentials, len(servers) > 1) for url in servers]
    serves = 2 * sum(each.grade == "ok" for each in found) > len(found)
    return [each._replace(grade="warn") if serves and each.grade == "fail" else each for each in found]


async def _check_nats(url: str, credentials: Credentials | None, of_cluster: bool) -> Finding:
    shown = strip_passwords(url)
    try:
        async with asyncio.timeout(_WITHIN):
            await queue.check(url, credentials, of_cluster)
    except ConfigError as error:
        return Finding("fail", "NATS", error.problems[0])
    except (QueueUnavailable, TimeoutError) as error:
        advice = "start it, or correct Graph.nats or Security.credentials."
        return Finding("fail", "NATS", f"{error_text(error, f'{shown}: no answer')}: {advice}")
    return Finding("ok", "NATS", f"{shown} answers, JetStream is on")


async def check_etcd(config: Config, credentials: Credentials | None) -> tuple[list[Finding], list[Instance]]:
    """Take a lease and write; return also the processes that are registered."""
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
