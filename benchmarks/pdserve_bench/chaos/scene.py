"""What every fault shares: its description, the graph and load it works on, and the wait for recovery."""

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
    name: str
    description: str
    play: "Callable[[Scene], Awaitable[float | None]]"
    """Inject the fault, undo it, return `Scene.recovery`. Raises Cannot, before any harm, if impossible here."""
    tags: tuple[str, ...] = ()
    """Further names for `--only`."""
    patient: bool = False
    """Requests may wait `recover_within` seconds, instead of `patience`."""
    kills_decode: bool = False
    """Decode workers die. Until the KV lease ends, prefill workers keep the KV that these had not read
    (docs/decisions/0007-lost-answers.md)."""
    silent: bool = False
    """No packet reports the loss, so others notice it seconds later."""
    headers: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Keys added to sections of the graph's file if `--only` names the fault."""


@dataclass(frozen=True)
class Options:
    faults: Sequence[Fault]
    seconds: float = 15.0
    """Minimal duration of the load per fault; the load continues until the graph has recovered."""
    hold: float = 12.0
    """Seconds that a hang or a cut lasts: longer than a lease in etcd."""
    concurrency: int = 8
    patience: float = 60.0
    """Seconds until a request counts as hung."""
    recover_within: float = 180.0
    seed: int = 1
    pool: Sequence[Case] = ()
    """Prompts with expected outputs; if empty, the undisturbed graph is asked."""


@dataclass
class Scene:
    """The graph, its load, and the findings of one fault."""

    running: RunningGraph
    config: Config
    watch: GraphWatch
    load: JudgedLoad
    options: Options
    say: Callable[[str], None]
    remote: bool
    turn: int = 0
    """Number of the fault, so that each fault hits another of several workers."""
    pool: Sequence[Case] = ()
    """The load's prompts with their outputs; empty with simulated engines, whose outputs are computed."""
    victims: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """Instances that were ended; their leases may outlive them."""
    amiss: list[str] = field(default_factory=list)
    """Sentences about failures other than those of the load's requests."""

    async def recovery(self) -> float | None:
        """Wait until the graph is complete and prefills remotely. Return the seconds; None after the timeout."""
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
