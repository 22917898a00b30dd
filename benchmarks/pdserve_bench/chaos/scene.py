"""What every fault has in common: how it is described, what it works with, and when the graph has recovered from it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.config.schema import Config
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.questions import Case
from pdserve_bench.graphs.launch import RunningGraph
from pdserve_bench.graphs.watch import GraphWatch


@dataclass(frozen=True)
class Fault:
    """One row of the scorecard."""

    name: str
    told: str
    play: "Callable[[Scene], Awaitable[float | None]]"
    """Do it, undo it, and return what `Scene.recovery` said. Raises Cannot, before any harm, where
    it cannot be done here."""
    tags: tuple[str, ...] = ()
    """further names by which `--only` finds it"""
    patient: bool = False
    """requests wait until there are workers again, however long that takes"""
    kills_decode: bool = False
    """what a dead decode worker had not read yet is kept by prefill workers until its lease ends
    (docs/decisions/0007-lost-answers.md)"""
    silent: bool = False
    """no packet says that they are gone, so that others notice it after some seconds"""
    headers: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """to sections of the graph's file, where `--only` names it"""


@dataclass(frozen=True)
class Options:
    faults: Sequence[Fault]
    seconds: float = 15.0
    """of load for each fault, at least; it goes on until the graph has recovered"""
    hold: float = 12.0
    """seconds that a hang or a cut lasts: longer than a lease in etcd"""
    concurrency: int = 8
    patience: float = 60.0
    """seconds after which a request counts as hung"""
    recover_within: float = 180.0
    seed: int = 1
    pool: Sequence[Case] = ()
    """prompts with their answers; empty: the graph's own are taken, while it is undisturbed"""


@dataclass
class Scene:
    """The graph, its load, and what one fault does to them."""

    running: RunningGraph
    config: Config
    watch: GraphWatch
    load: JudgedLoad
    options: Options
    say: Callable[[str], None]
    remote: bool
    turn: int = 0
    """counts the faults, so that another one of several workers is hit each time"""
    pool: Sequence[Case] = ()
    """the prompts that are asked, where answers cannot be computed"""
    victims: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """instances that were ended: their leases may outlive them"""
    amiss: list[str] = field(default_factory=list)
    """sentences about what went wrong and no client saw"""

    async def recovery(self) -> float | None:
        """Seconds until the graph is whole again and prefills remotely; None where it does not get there in time."""
        ended, within = time.monotonic(), self.options.recover_within
        try:
            async with asyncio.timeout(within):
                await self.watch.until_whole(self.gone, self.say)
                if self.remote:
                    await self.load.until(
                        lambda answer: answer.prefill == "remote" and answer.started > ended
                    )
        except TimeoutError:
            self.say(f"not recovered after {within:g} s")
            return None
        seconds = time.monotonic() - ended
        self.say(f"recovered after {seconds:.1f} s, {len(self.load.done)} requests so far")
        return seconds
