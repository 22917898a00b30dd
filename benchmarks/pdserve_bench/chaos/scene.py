"""What a scenario works with: the graph, its load, and where to tell what went wrong besides the requests."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import psutil

from pdserve.config.schema import Config
from pdserve.messages import Instance, Role
from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.faults import Fault
from pdserve_bench.chaos.launch import Running
from pdserve_bench.chaos.load import Load
from pdserve_bench.chaos.watch import Watch


@dataclass(frozen=True)
class Options:
    faults: "Sequence[Fault | Scenario]"
    seconds: float = 15.0
    """of load for each fault, at least; it goes on until the graph has recovered"""
    hold: float = 12.0
    """seconds that a hang or a cut lasts: longer than a lease in etcd"""
    concurrency: int = 8
    patience: float = 60.0
    """seconds after which a client says that its request hangs"""
    recover_within: float = 180.0
    seed: int = 1


@dataclass
class Scene:
    """Of one scenario, while it is played."""

    running: Running
    config: Config
    watch: Watch
    load: Load
    options: Options
    say: Callable[[str], None]
    recovery: Callable[[], Awaitable[float | None]]
    """seconds until the graph is whole again and prefills remotely; None where it does not get there in time"""
    pool: Sequence[Case] = ()
    """the prompts that are asked, where answers cannot be computed"""
    gone: set[str] = field(default_factory=set)
    """instances that were ended: their leases may outlive them"""
    amiss: list[str] = field(default_factory=list)
    """sentences about what went wrong and no client saw"""

    async def instances(self, *roles: Role) -> list[Instance]:
        return [each for each in await self.watch.instances() if each.role in roles or not roles]

    async def metrics(self, *roles: Role) -> dict[str, dict[str, float]]:
        """The values of each instance's own page, by instance id and series."""
        pages: dict[str, dict[str, float]] = {}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            for each in await self.instances(*roles):
                with suppress(httpx.HTTPError):
                    pages[each.id] = _series((await http.get(each.metrics)).text)
        return pages

    def family(self) -> list[psutil.Process]:
        """The graph's supervisor and all processes below it."""
        with suppress(psutil.Error):
            supervisor = psutil.Process(self.running.graph.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []


@dataclass(frozen=True)
class Scenario:
    """A fault that is a story of its own."""

    name: str
    told: str
    """what it does, for `--list`"""
    play: Callable[[Scene], Awaitable[float | None]]
    """Do it, undo it, and return what `recovery` said. Raises LookupError, with the reason, where it cannot be done
    here."""
    patient: bool = False
    """requests wait until there are workers again, however long that takes"""
    kills_decode: bool = False
    """as a Fault's"""
    headers: Mapping[str, str] = field(default_factory=dict)
    """of each request meanwhile"""


def _series(page: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(page: Mapping[str, float], name: str) -> float:
    """The sum over all labels."""
    return sum(value for series, value in page.items() if series.partition("{")[0] == name)
