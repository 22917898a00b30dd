"""`pdserve doctor`: check whether this machine is fit, and say what to do where it is not."""

import asyncio
import json
import os
import platform
import resource
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer
from rich.console import Console
from rich.text import Text

from pdserve import queue
from pdserve.clock import LARGE_SKEW
from pdserve.config.api_keys import configured
from pdserve.config.exposure import openings
from pdserve.config.host import VLLM_VERSION, InstalledVllm, installed_vllm
from pdserve.config.load import load
from pdserve.config.schema import Config, FrontendConfig
from pdserve.credentials import Credentials, expiring
from pdserve.errors import ConfigError, QueueUnavailable, RegistryUnavailable
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.plan import Plan, make_plan
from pdserve.plan.slots import Slot
from pdserve.queue import server_info
from pdserve.records import Role
from pdserve.registry import connect
from pdserve.supervisor.checks import busy_ports, running_graph
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer

_FILES = 4096
_SHARED_MEMORY = 1 * GIB
_RAM = 10 * GIB
_SERVER_TIMEOUT = 5.0
_TRANSFER_TIMEOUT = 60.0
_SLOW_TRANSFER = 0.5
"""GB/s; plain TCP between two processes of one machine is faster"""


def doctor(
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="check what this graph needs")
    ] = None,
) -> int:
    """Check whether this machine is fit: Python and vLLM versions, GPUs, memory and limits, ports, NATS with
    JetStream, etcd, and KV transfer, whose speed between two processes is measured; with a file also all for which
    `pdserve serve` would refuse it. Each line is ok, warn or fail, and says what to do. Exit code 1 where something
    failed.

    examples:
      pdserve doctor                            the defaults, with servers of its own
      pdserve doctor -f configs/disagg.yaml     the ports and servers of that graph
    """
    return asyncio.run(_report(file))


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    grade: Grade
    subject: str
    text: str
    advice: str = ""
    """what to do; empty where all is well"""


ok, warn, fail = (partial(Finding, grade) for grade in Grade)

_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}


async def _report(file: Path | None) -> int:
    """Print each finding as soon as it is made; return the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    async for finding in checks(file):
        failed |= finding.grade is Grade.FAIL
        console.print(_line(finding))
    return int(failed)


async def checks(file: Path | None) -> AsyncIterator[Finding]:
    machine = Machine.detect()
    plan = make_plan(load(file), machine) if file else None
    config = plan.config if plan else _defaults()
    yield check_python()
    yield check_vllm(installed_vllm())
    yield check_gpus(machine)
    yield await asyncio.to_thread(check_instruction_sets)
    yield check_memory(machine)
    yield check_open_files()
    yield check_shared_memory()
    for finding in (*check_graph(plan), *check_ports(config, plan.slots)) if plan else _default_ports(config):
        yield finding
    for finding in check_security(config):
        yield finding
    try:
        credentials = Credentials.load(config.security.credentials)
    except ConfigError:  # a problem of the plan
        yield fail("NATS, etcd", "not asked without the credentials that the file names")
    else:
        yield await check_nats(config.nats, credentials)
        if clock := await check_clock(config.nats, credentials):
            yield clock
        yield await check_etcd(config.etcd, credentials)
    yield await check_transfer()


def _defaults() -> Config:
    state_dir = Path(os.environ.get("PDSERVE_STATE_DIR", Config.state_dir)).expanduser()
    return Config(Path("(no file)"), "", "", FrontendConfig(), None, None, state_dir=state_dir)


def _default_ports(config: Config) -> Iterator[Finding]:
    """With one worker of each kind. A file may name others, so that busy ones are no failure."""
    slots = Slot(Role.DECODE, 0, (), config.kv_port), Slot(Role.PREFILL, 0, (), config.kv_port + 1)
    for finding in check_ports(config, slots):
        if finding.subject == "ports":
            yield replace(finding, grade=min(finding.grade, Grade.WARN, key=list(Grade).index))


def _line(finding: Finding) -> Text:
    line = Text(f"{finding.grade:<5}", _STYLES[finding.grade])
    line.append(f"{finding.subject:<12} ", "bold").append(finding.text, "")
    if finding.advice:
        line.append(f"\n{'':<18}→ {finding.advice}", _STYLES[finding.grade])
    return line


# the machine itself: versions, GPUs, memory, limits, ports


def check_python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info < (3, 14):
        return ok("Python", version)
    return fail("Python", version, "use Python 3.11, 3.12 or 3.13 (make install PYTHON=python3.12).")


def check_vllm(installed: InstalledVllm) -> Finding:
    if not installed.version:
        return fail("vLLM", "not installed", "run `make install`.")
    text = f"{installed.package} {installed.version}"
    if installed.version != VLLM_VERSION:
        return fail("vLLM", text, f"pdserve works with {VLLM_VERSION} only: run `make install`.")
    return ok("vLLM", text)


def check_gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        return ok("GPUs", "none: engines run on the CPU")
    text = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in machine.gpus)
    if machine.build == "cpu":
        return warn("GPUs", text, "the CPU build of vLLM is installed: run `make install PLATFORM=gpu`.")
    return ok("GPUs", text)


def check_instruction_sets() -> Finding:
    """Those with which engines compute on the CPU. Imports torch, which takes seconds."""
    try:
        from pdserve.engine.vllm import instruction_sets
    except ImportError as error:
        return fail("CPU", f"torch cannot be imported: {error}", "run `make install`.")
    text = instruction_sets.describe(instruction_sets.request_amx())
    if instruction_sets.FORBIDDEN in text:
        return warn(
            "CPU", text, "Linux before 5.16, or a sandbox: on the CPU, engines need `dtype: float32` here."
        )
    return ok("CPU", text)


def check_memory(machine: Machine) -> Finding:
    text = f"{machine.available / GIB:.1f} of {machine.memory / GIB:.1f} GiB free, {machine.cores} cores"
    if machine.available < _RAM:
        return warn("memory", text, "two engines on the CPU take about 7 GiB, a frontend 1 GiB.")
    return ok("memory", text)


def check_open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        advice = "each stream is a socket: raise the hard limit (ulimit -Hn, or LimitNOFILE= of systemd)."
        return warn("open files", text, advice)
    return ok("open files", f"{text} (serve raises the soft limit to that)")


def check_shared_memory() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return fail("/dev/shm", str(error), "vLLM's processes communicate through it: mount a tmpfs there.")
    free = stat.f_bavail * stat.f_frsize
    if free < _SHARED_MEMORY:
        return warn("/dev/shm", f"{free / GIB:.2f} GiB free", "docker: --shm-size 2g, or --ipc host.")
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free")


def check_graph(plan: Plan) -> Iterator[Finding]:
    """Ask what `serve` asks before it starts anything."""
    for problem in plan.problems:
        yield fail("graph", problem)
    if plan.fits is None:
        yield warn("graph", "it cannot be said whether it fits", plan.unknown)
    elif plan.fits:
        yield ok("graph", f"{plan.config.path} fits this machine")


def check_ports(config: Config, slots: Sequence[Slot]) -> Iterator[Finding]:
    """And the state directory. The ports of a running graph of this file are its own."""
    ours, problem = running_graph(config)
    if problem:
        yield fail("state", problem)
    try:
        problems = busy_ports(config, slots, ours)
    except ConfigError as error:
        problems = error.problems
    for busy in problems:
        text, _, advice = busy.partition(": ")
        yield fail("ports", text, advice)
    if not problems:
        needed = [config.frontend.port] if config.frontend else []
        needed += [slot.kv_port for slot in slots if slot.kv_port]
        yield ok("ports", f"{', '.join(map(str, needed))} are free{', or of the running graph' * bool(ours)}")


def check_security(config: Config) -> Iterator[Finding]:
    """Find what the file lets other machines reach, and certificates that expire."""
    security = config.security
    keys = configured(security, os.environ)
    closed = True
    for opening in openings(config, config.frontend, security, keys):
        closed = False
        yield warn("security", f"{opening.key} {opening.what}", f"{opening.advice}.")
    folder = security.credentials
    for file in filter(None, (folder and Credentials(folder).certificate, security.tls_certificate)):
        try:
            if text := expiring(file):
                yield warn("security", f"{file} {text}", "replace it before that, on all hosts.")
        except (OSError, ValueError):
            closed = False  # a problem of the plan
    if closed:
        yield ok("security", "other machines reach nothing that has no credentials, keys or TLS")


# NATS and etcd: the configured ones, or embedded ones that are started for the check


async def check_nats(url: str | None, credentials: Credentials | None = None) -> Finding:
    if url:
        return await _ask_nats(url, credentials)
    return await _embedded("NATS", EmbeddedNats, _ask_nats, credentials)


async def check_clock(url: str | None, credentials: Credentials | None = None) -> Finding | None:
    """Compare this host's clock with that of the NATS server; None where that is our own, or does not answer."""
    if url is None:
        return None
    try:
        async with asyncio.timeout(_SERVER_TIMEOUT):
            skew = await queue.clock_skew(url, credentials)
    except (QueueUnavailable, TimeoutError):
        return None
    if skew is None:
        return warn("clock", f"NATS at {url} does not tell its time", "NATS 2.10 and later does.")
    text = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of NATS at {url}"
    if abs(skew) > LARGE_SKEW:
        return warn("clock", text, "set both by NTP: logs of different hosts cannot be compared.")
    return ok("clock", text)


async def check_etcd(address: str | None, credentials: Credentials | None = None) -> Finding:
    if address:
        return await _ask_etcd(address, credentials)
    return await _embedded("etcd", EmbeddedEtcd, _ask_etcd, credentials)


async def _embedded(
    name: str,
    kind: type[EmbeddedServer],
    ask: Callable[[str, Credentials | None], Awaitable[Finding]],
    credentials: Credentials | None,
) -> Finding:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdserve-doctor-") as folder:
        try:
            async with kind(Path(folder), credentials=credentials) as server:
                seconds = time.monotonic() - started
                finding = await ask(server.url, credentials)
        except ConfigError as error:
            return fail(name, str(error), "run `make install`, or configure a server of your own.")
    return Finding(
        finding.grade, name, f"embedded, starts in {seconds:.1f} s; {finding.text}", finding.advice
    )


async def _ask_nats(url: str, credentials: Credentials | None) -> Finding:
    try:
        async with asyncio.timeout(_SERVER_TIMEOUT):
            info = await server_info(url)
    except OSError as error:
        return fail("NATS", f"{url}: {error or 'no answer'}", "start it, or correct Graph: nats.")
    if not info.get("jetstream"):
        return fail("NATS", f"{url}: no JetStream", "start nats-server with --jetstream.")
    try:
        await queue.clock_skew(url, credentials)
    except QueueUnavailable as error:
        return fail(
            "NATS", str(error), "start it with the graph's credentials, or correct Security: credentials."
        )
    return ok("NATS", f"{info.get('version')} at {url}, JetStream is on")


async def _ask_etcd(address: str, credentials: Credentials | None) -> Finding:
    """Take a lease, write and read, in a namespace of this check alone."""
    try:
        async with connect(address, f"pdserve-doctor-{uuid4().hex[:8]}", credentials) as registry:
            started = time.monotonic()
            await registry.put("probe", b"1")
            found = await registry.read("")
            milliseconds = (time.monotonic() - started) * 1000
    except RegistryUnavailable as error:
        return fail("etcd", str(error), "start it, or correct Graph: etcd or Security: credentials.")
    if found != {"probe": b"1"}:
        return fail("etcd", f"{address}: what was written is not there", "check the server's health.")
    return ok("etcd", f"at {address}, a write and a read in {milliseconds:.0f} ms")


# KV transfer


async def check_transfer() -> Finding:
    """Measure the speed of a transfer; any failure is a finding."""
    try:
        async with asyncio.timeout(_TRANSFER_TIMEOUT):
            speed, backend = await _measure()
    except TimeoutError:
        return fail(
            "KV transfer", f"no result after {_TRANSFER_TIMEOUT:g} s", "see what UCX_LOG_LEVEL=info says."
        )
    except RuntimeError as error:
        return fail("KV transfer", str(error), "run `make install`; see what UCX_LOG_LEVEL=info says.")
    text = f"{speed:.1f} GB/s through host memory between two processes ({backend})"
    if speed < _SLOW_TRANSFER:
        advice = (
            "is the machine busy? Else check UCX_TLS, and ptrace rights between processes (CAP_SYS_PTRACE)."
        )
        return warn("KV transfer", text, advice)
    return ok("KV transfer", text)


async def _measure() -> tuple[float, str]:
    async with _nixl_process("lend") as lender:
        offer = await _read_line(lender)
        async with _nixl_process("borrow") as borrower:
            assert borrower.stdin is not None
            borrower.stdin.write(offer)
            result = json.loads(await _read_line(borrower))
    return float(result["gigabytes_per_second"]), str(result["backend"])


@asynccontextmanager
async def _nixl_process(part: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "pdserve.cli.doctor_transfer", part)
    env = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore", **os.environ}
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _read_line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    if line := await process.stdout.readline():
        return line
    raise RuntimeError("a NIXL process ended without a result")
