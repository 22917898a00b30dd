"""For `pdserve doctor`: checks that this host reaches the ports that processes open for each other, and can read KV."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pdserve.contract.records import Instance, Role, decode_instance
from pdserve.observe.graph_state import slot_name
from pdserve.plan.plan import Plan
from pdserve.util.errors import ProtocolError, error_text

CONNECT_TIMEOUT = 3.0
"""Seconds."""
MEASURE_TIMEOUT = 30.0
"""Seconds for the measurement of a host, most of them for imports."""
MAX_MEASURED = 8
"""Maximum of hosts from which a read of KV is measured."""


class Finding(NamedTuple):
    grade: str
    """ok, warn or fail"""
    subject: str
    text: str


class Port(NamedTuple):
    host: str
    number: int
    use: str
    process: str
    variable: str
    """environment variable that fixes the port"""


def decoded(values: Iterable[bytes]) -> list[Instance]:
    """Return the instances that this version can decode, sorted by host."""
    instances = []
    for value in values:
        try:
            instances.append(decode_instance(value))
        except ProtocolError:
            continue
    return sorted(instances, key=lambda instance: (instance.host, instance.id))


async def check_hosts(plan: Plan, instances: list[Instance]) -> AsyncIterator[Finding]:
    """Connect to all ports at once, so that a silent host delays no other. Then measure a read of KV from one worker
    of each host, one host after the other, because the reads share this host's network."""
    ports = [port for instance in instances for port in _ports(instance)]
    attempts = dict(zip(ports, await asyncio.gather(*map(_connect, ports)), strict=True))
    measured = 0
    for host, of_host in groupby(instances, key=lambda instance: instance.host):
        for finding in _findings(host, {port: attempts[port] for port in attempts if port.host == host}):
            yield finding
        readable = [each.kv for each in of_host if each.kv and not attempts[_kv_port(each)].problem]
        if readable and measured < MAX_MEASURED:
            measured += 1
            yield await _measure(plan, readable[0])


# ports


def _ports(instance: Instance) -> Iterator[Port]:
    if instance.metrics:
        yield _port(instance, instance.metrics, "pages", "PDSERVE_PAGES_PORT")
    if instance.address and instance.role is not Role.FRONTEND:  # a frontend's API is for clients
        yield _port(instance, instance.address, "stream", "PDSERVE_STREAM_PORT")
    if instance.kv:
        yield _kv_port(instance)


def _kv_port(instance: Instance) -> Port:
    return _port(instance, f"tcp://{instance.kv}", "KV", "PDSERVE_KV_PORT")


def _port(instance: Instance, url: str, use: str, variable: str) -> Port:
    return Port(instance.host, urlsplit(url).port or 0, use, instance.id, variable)


class Attempted(NamedTuple):
    seconds: float = 0.0
    problem: str = ""


async def _connect(port: Port) -> Attempted:
    started = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(port.host, port.number)
    except TimeoutError:
        return Attempted(
            problem=f"no answer within {CONNECT_TIMEOUT:g} s: a firewall drops it, or the host is down"
        )
    except ConnectionRefusedError:
        return Attempted(problem="refused: nothing listens there now, or a firewall rejects it")
    except OSError as error:
        return Attempted(problem=error_text(error))
    writer.close()
    return Attempted(time.perf_counter() - started)


def _findings(host: str, attempts: dict[Port, Attempted]) -> Iterator[Finding]:
    """Yield one finding for all ports that were reached, and one for each that was not."""
    latency = {port: attempt.seconds for port, attempt in attempts.items() if not attempt.problem}
    if latency:
        ports = ", ".join(f"{port.number} ({port.use} of {slot_name(port.process)})" for port in latency)
        yield Finding("ok", "hosts", f"{host} is reached at {ports}; {_ms(min(latency.values()))}")
    for port, (_, problem) in attempts.items():
        if problem:
            what = f"{host}:{port.number}, {port.use} of {port.process}: {problem}"
            advice = f"let {host} accept TCP {port.number} from this host ({port.variable} fixes the port)"
            yield Finding("fail", "hosts", f"{what}: {advice}, or correct PDSERVE_HOST on {host}.")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


# KV


async def _measure(plan: Plan, address: str) -> Finding:
    """Read KV from an address, in a separate process. UCX takes any free ports, so only a read shows that they are
    open."""
    folder = plan.config.security.credentials
    command = [sys.executable, "-m", "pdserve.kv.probe", address, *([str(folder)] if folder else [])]
    found = await _run_json(command, {**os.environ, **_ucx(plan)})
    if "bandwidth" in found:
        rate, latency = found["bandwidth"] / 1e9, found["latency"] * 1e6
        text = f"{address}: {rate:.3g} GB/s, {latency:.0f} us, connected in {_ms(found['connected'])}"
        return Finding("ok", "KV", text)
    advice = "let both hosts accept TCP from each other on UCX's ports (UCX_TCP_PORT_RANGE fixes them)."
    return Finding("fail", "KV", f"{address}: its KV cannot be read: {found['error']}: {advice}")


async def _run_json(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Return the JSON in the last line of the output (NIXL writes lines before it); else {"error": ...}."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(MEASURE_TIMEOUT):
            out, err = await process.communicate()
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except TimeoutError:
        process.kill()
        await process.communicate()
        return {"error": f"no answer within {MEASURE_TIMEOUT:g} s"}
    except (ValueError, LookupError):
        return {"error": (err.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]}
    return answer


def _ucx(plan: Plan) -> dict[str, str]:
    return {
        name: value
        for worker in plan.workers
        for name, value in worker.slot.env.items()
        if name.startswith("UCX_")
    }
