"""The way from this host to every process of the graph, for `pdserve doctor`: ports, and what KV does on it."""

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

KNOCK_WITHIN = 3.0
"""seconds; all doors are tried at the same time"""
MEASURE_WITHIN = 30.0
"""seconds for a host: most of them for imports"""
MOST_MEASURED = 8
"""hosts whose KV is measured, one after the other, since they share this host's network"""


class Finding(NamedTuple):
    grade: str
    """ok, warn or fail"""
    subject: str
    text: str


class Door(NamedTuple):
    host: str
    port: int
    use: str
    process: str
    variable: str
    """that fixes the port"""


def decoded(values: Iterable[bytes]) -> list[Instance]:
    """Those of this version."""
    instances = []
    for value in values:
        try:
            instances.append(decode_instance(value))
        except ProtocolError:
            continue
    return sorted(instances, key=lambda instance: (instance.host, instance.id))


async def check_hosts(plan: Plan, instances: list[Instance]) -> AsyncIterator[Finding]:
    """Each host in its turn, after all doors were tried at once: a host that does not answer hides no other."""
    doors = [door for instance in instances for door in _doors(instance)]
    tried = dict(zip(doors, await asyncio.gather(*map(_knock, doors)), strict=True))
    measured = 0
    for host, there in groupby(instances, key=lambda instance: instance.host):
        for finding in _doors_of(host, {door: tried[door] for door in tried if door.host == host}):
            yield finding
        readable = [
            instance.kv for instance in there if instance.kv and not tried[_kv_door(instance)].problem
        ]
        if readable and measured < MOST_MEASURED:
            measured += 1
            yield await _measure(plan, readable[0])


# doors


def _doors(instance: Instance) -> Iterator[Door]:
    if instance.metrics:
        yield _door(instance, instance.metrics, "pages", "PDSERVE_PAGES_PORT")
    if instance.address and instance.role is not Role.FRONTEND:  # its API is for clients
        yield _door(instance, instance.address, "stream", "PDSERVE_STREAM_PORT")
    if instance.kv:
        yield _kv_door(instance)


def _kv_door(instance: Instance) -> Door:
    return _door(instance, f"tcp://{instance.kv}", "KV", "PDSERVE_KV_PORT")


def _door(instance: Instance, url: str, use: str, variable: str) -> Door:
    return Door(instance.host, urlsplit(url).port or 0, use, instance.id, variable)


class Knocked(NamedTuple):
    seconds: float = 0.0
    problem: str = ""


async def _knock(door: Door) -> Knocked:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(KNOCK_WITHIN):
            _, writer = await asyncio.open_connection(door.host, door.port)
    except TimeoutError:
        return Knocked(
            problem=f"no answer within {KNOCK_WITHIN:g} s: a firewall drops it, or the host is away"
        )
    except ConnectionRefusedError:
        return Knocked(problem="refused: nothing listens there now, or a firewall rejects it")
    except OSError as error:
        return Knocked(problem=error_text(error))
    writer.close()
    return Knocked(time.perf_counter() - began)


def _doors_of(host: str, tried: dict[Door, Knocked]) -> Iterator[Finding]:
    """One line for what is open, one for each closed door."""
    reached = {door: knocked.seconds for door, knocked in tried.items() if not knocked.problem}
    if reached:
        ports = ", ".join(f"{door.port} ({door.use} of {slot_name(door.process)})" for door in reached)
        yield Finding("ok", "hosts", f"{host} is reached at {ports}; {_ms(min(reached.values()))}")
    for door, (_, problem) in tried.items():
        if problem:
            advice = f"let {host} take TCP {door.port} from this host ({door.variable} fixes the port)"
            advice += f", or correct PDSERVE_HOST on {host}."
            yield Finding(
                "fail", "hosts", f"{host}:{door.port}, {door.use} of {door.process}: {problem}: {advice}"
            )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


# KV


async def _measure(plan: Plan, address: str) -> Finding:
    """Read KV in a process of its own: UCX listens on free ports, which are known only when it was tried."""
    folder = plan.config.security.credentials
    command = [sys.executable, "-m", "pdserve.kv.probe", address, *([str(folder)] if folder else [])]
    found = await _answer_of(command, {**os.environ, **_ucx(plan)})
    if "bandwidth" in found:
        rate, latency = found["bandwidth"] / 1e9, found["latency"] * 1e6
        text = f"{address}: {rate:.3g} GB/s, {latency:.0f} us, connected in {_ms(found['connected'])}"
        return Finding("ok", "KV", text)
    advice = "let both hosts take TCP from each other on UCX's ports (UCX_TCP_PORT_RANGE fixes them)."
    return Finding("fail", "KV", f"{address}: its KV cannot be read: {found['error']}: {advice}")


async def _answer_of(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """NIXL writes lines of its own before the answer."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(MEASURE_WITHIN):
            out, err = await process.communicate()
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except TimeoutError:
        process.kill()
        await process.communicate()
        return {"error": f"nothing comes within {MEASURE_WITHIN:g} s"}
    except (ValueError, LookupError):
        return {"error": (err.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]}
    return answer


def _ucx(plan: Plan) -> dict[str, str]:
    """What UCX gets in this host's workers."""
    return {
        name: value
        for worker in plan.workers
        for name, value in worker.slot.env.items()
        if name.startswith("UCX_")
    }
