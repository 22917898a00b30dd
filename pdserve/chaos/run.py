"""The whole exercise: a graph, load, one fault after the other, the rows of the scorecard."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pdserve.chaos import cases as questions
from pdserve.chaos import reference
from pdserve.chaos.cases import Case
from pdserve.chaos.client import Client
from pdserve.chaos.cut import Cannot, cut_off
from pdserve.chaos.faults import Fault, Kind, Target, Victim, find, send
from pdserve.chaos.load import Load
from pdserve.chaos.score import Row, score
from pdserve.chaos.watch import Watch
from pdserve.config.load import load as load_config
from pdserve.errors import Unavailable
from pdserve.messages import Role
from pdserve.registry import connect
from pdserve.supervisor.state import Graph

log = logging.getLogger(__name__)

CALM = "none"
"""the first row: the same load, and no fault"""


@dataclass(frozen=True)
class Options:
    faults: Sequence[Fault]
    seconds: float = 15.0
    """of load for each fault, at least; it goes on until the graph has recovered"""
    hold: float = 12.0
    """seconds that a hang or a cut lasts: longer than a lease in etcd"""
    concurrency: int = 8
    patience: float = 60.0
    """seconds after which a client says that its request hangs"""
    recover_within: float = 180.0
    settle: float = 40.0
    """seconds after the last request in which every block has to be free: the lease of KV that a dead decode
    worker never fetched, and some more"""
    seed: int = 1


class Chaos:
    """`rows` yields the scorecard line by line. The graph runs on this machine, on `state_dir`."""

    def __init__(
        self, graph: Graph, state_dir: Path, options: Options, watch: Watch, say: Callable[[str], None]
    ) -> None:
        self._graph = graph
        self._state_dir = state_dir
        self._options = options
        self._watch = watch
        self._say = say
        self._turn = 0
        self._remote = False

    async def rows(self) -> AsyncIterator[Row]:
        instances = await self._watch.learn()
        self._remote = any(one.role is Role.PREFILL for one in instances)
        there = ", ".join(f"{count} {role}" for role, count in sorted(self._watch.whole.items()))
        self._say(f"{self._graph.model} at {self._graph.url}: {there}")
        cases = await self._cases(min(one.max_model_len for one in instances if one.max_model_len))
        yield await self._stage(None, None, cases)
        for fault in self._options.faults:
            try:
                victim = await self._find(fault)
                yield await self._stage(fault, victim, cases)
            except (LookupError, Cannot) as reason:
                self._say(f"{fault.name}: {reason}")
                yield Row(fault.name, skipped=str(reason))

    async def _find(self, fault: Fault) -> Victim:
        self._turn += 1
        instances = await self._watch.instances()
        return find(fault.target, self._turn, instances, self._graph.pid, self._state_dir)

    # questions

    async def _cases(self, max_model_len: int) -> Iterator[Case]:
        config = load_config(Path(self._graph.config))
        cases = questions.endless(questions.shape(config, max_model_len), self._options.seed)
        if model := questions.simulated(config):
            return (replace(case, expected=questions.computed(case, model)) for case in cases)
        self._say("asking the undisturbed graph for the right answers")
        async with reference.http() as http:
            client = Client(self._graph.url, self._graph.model, http)
            pool = await reference.learn(client, cases, self._options.patience)
        self._say(f"{len(pool)} of {reference.POOL} prompts have one answer, and are used")
        return reference.again(pool)

    # one fault

    async def _stage(self, fault: Fault | None, victim: Victim | None, cases: Iterator[Case]) -> Row:
        options, name = self._options, fault.name if fault else CALM
        started = time.monotonic()
        recovered: float | None = 0.0
        async with Load(
            self._graph.url, self._graph.model, cases, options.concurrency, options.patience
        ) as load:
            await self._until_warm(load)
            if fault and victim:
                self._say(
                    f"{name}: {victim.name} (group {victim.group}), {load.in_flight} requests in flight"
                )
                recovered = await self._harm(fault, victim, load)
                self._say(f"{name}: {_after(recovered)}, {len(load.done)} requests so far")
            await asyncio.sleep(max(0.0, started + options.seconds - time.monotonic()))
        left = await self._watch.leftovers(options.settle)
        row = score(name, victim.name if victim else "", load.seen(), recovered, left)
        for trouble in (
            *row.errors,
            *(f"{one} still holds {held} blocks" for one, held in left.blocks.items()),
        ):
            self._say(f"{name}: {trouble}")
        return row

    async def _until_warm(self, load: Load) -> None:
        """All clients are at it, and KV crosses."""
        try:
            async with asyncio.timeout(self._options.patience):
                await load.until(lambda one: not one.error, self._options.concurrency)
                if self._remote:
                    await load.until(lambda one: one.prefill == "remote")
        except TimeoutError:
            errors = {one.error for one in load.done if one.error}
            raise Unavailable(
                f"the graph does not serve this load: {errors or 'no remote prefill'}"
            ) from None

    async def _harm(self, fault: Fault, victim: Victim, load: Load) -> float | None:
        """Seconds from the fault's end to the recovery; None where it did not recover in time."""
        async with self._injected(fault, victim, load):
            if fault.kind is not Kind.KILL:
                await asyncio.sleep(self._options.hold)
        ended = time.monotonic()
        try:
            async with asyncio.timeout(self._options.recover_within):
                await self._watch.until_whole(victim.name if fault.kind is Kind.KILL else "")
                if self._remote:
                    await load.until(lambda one: one.prefill == "remote" and one.started > ended)
        except TimeoutError:
            return None
        return time.monotonic() - ended

    @asynccontextmanager
    async def _injected(self, fault: Fault, victim: Victim, load: Load) -> AsyncIterator[None]:
        match fault.kind:
            case Kind.KILL:
                if fault.target is Target.FRONTEND:
                    load.frontend_dies(await self._ports_of_others(victim))
                send(victim, signal.SIGKILL)
                yield
            case Kind.HANG:
                send(victim, signal.SIGSTOP)
                try:
                    yield
                finally:
                    send(victim, signal.SIGCONT)
            case Kind.CUT:
                async with cut_off(victim.group, _family(self._graph.pid)):
                    yield

    async def _ports_of_others(self, victim: Victim) -> set[int]:
        """Clients' ports of the connections that the other frontends hold."""
        frontends = [one for one in await self._watch.instances() if one.role is Role.FRONTEND]
        others = [psutil.Process(one.pid) for one in frontends if one.pid != victim.group]
        return {end.raddr.port for one in others for end in one.net_connections("tcp") if end.raddr}


def _family(supervisor: int) -> list[int]:
    return [supervisor, *(one.pid for one in psutil.Process(supervisor).children(recursive=True))]


def _after(recovered: float | None) -> str:
    return "not recovered in time" if recovered is None else f"recovered after {recovered:.1f} s"


@asynccontextmanager
async def chaos(
    graph: Graph, state_dir: Path, options: Options, say: Callable[[str], None]
) -> AsyncIterator[Chaos]:
    """Raises RegistryUnavailable."""
    async with connect(graph.etcd, graph.namespace) as registry:
        yield Chaos(graph, state_dir, options, Watch(registry), say)
