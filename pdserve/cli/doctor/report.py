"""The checks in a row, each shown as soon as it is done."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pdserve.cli.doctor import host, servers
from pdserve.cli.doctor.finding import Finding, Grade
from pdserve.cli.doctor.transfer import transfer
from pdserve.config.host import installed_vllm
from pdserve.config.load import load
from pdserve.config.schema import Config, FrontendConfig
from pdserve.messages import Role
from pdserve.plan.machine import Machine
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import Slot

_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}


async def report(file: Path | None) -> int:
    """The exit code: 1 where something failed."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    async for finding in checks(file):
        failed |= finding.grade is Grade.FAIL
        console.print(_line(finding))
    return int(failed)


async def checks(file: Path | None) -> AsyncIterator[Finding]:
    machine = Machine.detect()
    config, slots = _graph(file, machine)
    yield host.python()
    yield host.vllm(installed_vllm())
    yield host.gpus(machine)
    yield await asyncio.to_thread(host.instruction_sets)
    yield host.memory(machine)
    yield host.open_files()
    yield host.shared_memory()
    for finding in host.ports(config, slots):
        yield finding
    yield await servers.nats(config.nats)
    if clocks := await servers.clocks(config.nats):
        yield clocks
    yield await servers.etcd(config.etcd)
    yield await transfer()


def _graph(file: Path | None, machine: Machine) -> tuple[Config, tuple[Slot, ...]]:
    """Without a file: the default ports, one worker of each kind."""
    if file is not None:
        config = load(file)
        return config, make_plan(config, machine).slots
    config = Config(Path("(no file)"), "", "", FrontendConfig(), None, None)
    workers = (Slot(Role.DECODE, 0, (), config.kv_port), Slot(Role.PREFILL, 0, (), config.kv_port + 1))
    return config, workers


def _line(finding: Finding) -> Text:
    line = Text(f"{finding.grade:<5}", _STYLES[finding.grade])
    line.append(f"{finding.subject:<12} ", "bold").append(finding.text, "")
    if finding.advice:
        line.append(f"\n{'':<18}→ {finding.advice}", _STYLES[finding.grade])
    return line
