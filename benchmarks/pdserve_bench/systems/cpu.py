"""CPU seconds of a system, by what each of its processes is."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class CpuReading:
    """How much was spent by then, or between two of them, in seconds."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def since(self, before: "CpuReading") -> "CpuReading":
        """What was spent in between; `at` is then how long that was."""
        spent = {name: value - before.seconds.get(name, 0.0) for name, value in self.seconds.items()}
        return CpuReading(spent, self.at - before.at)


class CpuMeter:
    """Reads the CPU time of these processes. They are found and named once, so that reading costs a fraction of a
    millisecond and can be done beside a running load. What has ended since keeps the figure that was read last."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes: list[tuple[int, str]] = []
        for process in processes:
            with suppress(psutil.Error):
                self._processes.append((process.pid, label(process)))
        self._last: dict[int, float] = {}

    def read(self) -> CpuReading:
        spent: dict[str, float] = {}
        for pid, name in self._processes:
            with suppress(OSError):
                self._last[pid] = cpu_seconds(pid)
            spent[name] = spent.get(name, 0.0) + self._last.get(pid, 0.0)
        return CpuReading(spent)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, those that have ended included, to the nanosecond: what psutil reads from
    /proc is counted in hundredths. Raises OSError where it is gone."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)


def label(process: psutil.Process) -> str:
    """What it is: `supervisor`, `guardian`, `frontend`, `decode`, `decode EngineCore`, `decode VllmWorker`,
    `nats-server`, `etcd`, `vllm server`, `vllm EngineCore`, ... Raises psutil.Error where it is gone."""
    chain: list[tuple[str, Sequence[str]]] = []
    above: psutil.Process | None = process
    while above is not None and len(chain) < 8:
        chain.append((above.name(), above.cmdline()))
        above = above.parent()
    return name_of(chain)


def name_of(chain: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Name the first process, given its name and command line, those of its parent, and so on up."""
    name, command = chain[0]
    if name.startswith("VLLM::"):  # vLLM 0.32 titles the processes of an engine: VLLM::Worker_TP0
        part = name.removeprefix("VLLM::").partition("_")[0]
        return f"{_owner(chain[1:])} {part.replace('Worker', 'VllmWorker')}"
    if any(word.endswith("api_server.entry") for word in command):
        return "vllm server"
    words = [Path(word).name for word in command]
    if "guardian.py" in words:
        return "guardian"
    if "pdserve" in words[:-1]:
        role = words[words.index("pdserve") + 1]
        return "supervisor" if role == "serve" else role
    if any("multiprocessing.resource_tracker" in word for word in command):
        return f"{_owner(chain[1:])} resource tracker"
    return name


def _owner(chain: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The role, or the server, that a process of an engine belongs to: the first above it that is none itself."""
    for at, (name, _) in enumerate(chain):
        if not name.startswith("VLLM::"):
            return name_of(chain[at:]).removesuffix(" server")
    return "vllm"
