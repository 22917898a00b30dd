"""Checks of the machine itself: versions, GPUs, memory, limits, ports."""

import os
import platform
import resource
import sys
from collections.abc import Iterable, Iterator

from pdserve.cli.doctor.finding import Finding, fail, ok, warn
from pdserve.config.host import VLLM_VERSION, InstalledVllm
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.slots import Slot
from pdserve.supervisor.checks import busy_ports

_FILES = 4096
_SHARED_MEMORY = 1 * GIB
_RAM = 10 * GIB


def python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info < (3, 14):
        return ok("Python", version)
    return fail("Python", version, "use Python 3.11, 3.12 or 3.13 (make install PYTHON=python3.12).")


def vllm(installed: InstalledVllm) -> Finding:
    if not installed.version:
        return fail("vLLM", "not installed", "run `make install`.")
    text = f"{installed.package} {installed.version}"
    if installed.version != VLLM_VERSION:
        return fail("vLLM", text, f"pdserve works with {VLLM_VERSION} only: run `make install`.")
    return ok("vLLM", text)


def gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        return ok("GPUs", "none: engines run on the CPU")
    text = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in machine.gpus)
    if machine.build == "cpu":
        return warn("GPUs", text, "the CPU build of vLLM is installed: run `make install PLATFORM=gpu`.")
    return ok("GPUs", text)


def instruction_sets() -> Finding:
    """Those of the CPU that engines on it compute with. Imports torch, which takes seconds."""
    try:
        from pdserve.engine import instruction_sets
    except ImportError as error:
        return fail("CPU", f"torch cannot be imported: {error}", "run `make install`.")
    text = instruction_sets.describe(instruction_sets.request_amx())
    if instruction_sets.FORBIDDEN in text:
        return warn(
            "CPU", text, "Linux before 5.16, or a sandbox: on the CPU, engines need `dtype: float32` here."
        )
    return ok("CPU", text)


def memory(machine: Machine) -> Finding:
    text = f"{machine.available / GIB:.1f} of {machine.memory / GIB:.1f} GiB free, {machine.cores} cores"
    if machine.available < _RAM:
        return warn("memory", text, "two engines on the CPU take about 7 GiB, a frontend 1 GiB.")
    return ok("memory", text)


def open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        advice = "each stream is a socket: raise the hard limit (ulimit -Hn, or LimitNOFILE= of systemd)."
        return warn("open files", text, advice)
    return ok("open files", f"{text} (serve raises the soft limit to that)")


def shared_memory() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return fail("/dev/shm", str(error), "vLLM's processes talk through it: mount a tmpfs there.")
    free = stat.f_bavail * stat.f_frsize
    if free < _SHARED_MEMORY:
        return warn("/dev/shm", f"{free / GIB:.2f} GiB free", "docker: --shm-size 2g, or --ipc host.")
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free")


def ports(config: Config, slots: Iterable[Slot]) -> Iterator[Finding]:
    slots = list(slots)
    try:
        problems = busy_ports(config, slots)
    except ConfigError as error:
        problems = error.problems
    if problems:
        for problem in problems:
            text, _, advice = problem.partition(": ")
            yield warn("ports", text, advice)
        return
    taken = [str(slot.kv_port) for slot in slots if slot.kv_port]
    frontend = [str(config.frontend.port)] if config.frontend else []
    yield ok("ports", f"{', '.join(frontend + taken)} are free")
