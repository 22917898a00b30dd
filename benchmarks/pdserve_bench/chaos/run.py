"""The whole exercise: a graph, load, one fault after the other, the rows of the scorecard."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from pdserve.config.load import load as load_config
from pdserve.errors import Unavailable
from pdserve.messages import Role
from pdserve_bench.chaos import cases as questions
from pdserve_bench.chaos import reference
from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.client import Client
from pdserve_bench.chaos.cut import Cannot
from pdserve_bench.chaos.faults import Fault, Kind, Target, Victim, find
from pdserve_bench.chaos.inject import injected
from pdserve_bench.chaos.launch import Running
from pdserve_bench.chaos.load import Load
from pdserve_bench.chaos.scene import Options, Scenario, Scene
from pdserve_bench.chaos.score import Row, score
from pdserve_bench.chaos.watch import Watch, told

log = logging.getLogger(__name__)

CALM = "none"
"""the first row: the same load, and no fault"""
WARM_WITHIN = 60.0
SETTLE = 10.0
"""seconds after the last request in which every block has to be free: long before a lease ends"""
SETTLE_AFTER_DEATH = 40.0
"""the same where decode workers were killed: a lease, and some more"""
KILLED_FRONTEND = Fault(Target.FRONTEND, Kind.KILL)
"""nobody can save what was on its connections"""
NOBODY_LEFT = Fault(Target.ALL_DECODE, Kind.KILL)
"""requests wait until somebody is back, however long that takes"""
MOST_TOLD = 8
"""requests of a row that get a line of their own; the scorecard's JSON has all"""


class Chaos:
    """`rows` yields the scorecard line by line. The graph runs on this machine."""

    def __init__(self, running: Running, options: Options, watch: Watch, say: Callable[[str], None]) -> None:
        self._running = running
        self._config = load_config(Path(running.graph.config))
        self._pool: list[Case] = []
        self._options = options
        self._watch = watch
        self._say = say
        self._turn = 0
        self._remote = False

    async def rows(self) -> AsyncIterator[Row]:
        instances = await self._watch.learn()
        self._remote = any(one.role is Role.PREFILL for one in instances)
        graph = self._running.graph
        self._say(f"{graph.model} at {graph.url}: {told(self._watch.whole)}")
        cases = await self._cases(min(one.max_model_len for one in instances if one.max_model_len))
        yield await self._while_it_lives(self._stage(CALM, None, [], cases))
        for number, fault in enumerate(self._options.faults, 1):
            name = f"[{number}/{len(self._options.faults)}] {fault.name}"
            try:
                yield await self._while_it_lives(self._row(name, fault, cases))
            except (LookupError, Cannot) as reason:
                self._say(f"{name}: skipped, {reason}")
                yield Row(fault.name, skipped=str(reason))

    async def _row(self, name: str, fault: Fault | Scenario, cases: Iterator[Case]) -> Row:
        rounds = await self._find(fault) if isinstance(fault, Fault) else []
        return await self._stage(name, fault, rounds, cases)

    async def _find(self, fault: Fault) -> list[list[Victim]]:
        self._turn += 1
        instances = await self._watch.instances()
        graph = self._running.graph
        return find(fault.target, self._turn, instances, graph.pid, self._running.state_dir)

    async def _while_it_lives(self, stage: Coroutine[None, None, Row]) -> Row:
        """Raises Unavailable once the graph's supervisor is gone: nobody will start anything again."""
        work = asyncio.create_task(stage)
        try:
            while not work.done():
                if not self._running.alive:
                    raise Unavailable("the graph has given up: its supervisor is gone")
                await asyncio.wait({work}, timeout=1)
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    # questions

    async def _cases(self, max_model_len: int) -> Iterator[Case]:
        cases = questions.endless(questions.shape(self._config, max_model_len), self._options.seed)
        if model := questions.simulated(self._config):
            return (replace(case, expected=questions.computed(case, model)) for case in cases)
        self._say("asking the undisturbed graph for the right answers")
        async with reference.http() as http:
            client = Client(self._running.graph.url, self._running.graph.model, http)
            self._pool = await reference.learn(client, cases, self._options.patience)
        self._say(f"{len(self._pool)} of {reference.POOL} prompts have one answer, and are used")
        return reference.again(self._pool)

    # one fault

    async def _stage(
        self,
        name: str,
        fault: Fault | Scenario | None,
        rounds: Sequence[Sequence[Victim]],
        cases: Iterator[Case],
    ) -> Row:
        options, graph = self._options, self._running.graph
        patience = options.recover_within if _is_patient(fault) else options.patience
        headers = fault.headers if isinstance(fault, Scenario) else None
        started = time.monotonic()
        recovered: float | None = 0.0
        amiss: list[str] = []
        async with Load(graph.url, graph.model, cases, options.concurrency, patience, headers) as load:
            await self._until_warm(load)
            began = time.monotonic()
            if isinstance(fault, Scenario):
                recovered = await self._play(name, fault, load, amiss)
            elif fault:
                recovered = await self._harm(name, fault, rounds, load)
            await asyncio.sleep(max(0.0, started + options.seconds - time.monotonic()))
        self._say(f"{name}: {len(load.done)} requests; waiting until every KV block is free")
        left = await self._watch.leftovers(SETTLE_AFTER_DEATH if fault and fault.kills_decode else SETTLE)
        plain = fault.name if fault else CALM
        victims = " ".join(one.name for each in rounds for one in each) or (plain if fault else "")
        row = score(plain, victims, load.seen(plain, began), recovered, left, amiss)
        for trouble in _troubles(row):
            self._say(f"{name}: {trouble}")
        return row

    async def _play(self, name: str, scenario: Scenario, load: Load, amiss: list[str]) -> float | None:
        gone: set[str] = set()

        def say(text: str) -> None:
            self._say(f"{name}: {text}")

        scene = Scene(
            self._running,
            self._config,
            self._watch,
            load,
            self._options,
            say,
            recovery=lambda: self._recovery(name, gone, load),
            gone=gone,
            amiss=amiss,
            pool=self._pool,
        )
        return await scenario.play(scene)

    async def _until_warm(self, load: Load) -> None:
        """All clients are at it, and KV crosses."""
        try:
            async with asyncio.timeout(WARM_WITHIN):
                await load.until(lambda one: not one.error, self._options.concurrency)
                if self._remote:
                    await load.until(lambda one: one.prefill == "remote")
        except TimeoutError:
            errors = {one.error for one in load.done if one.error}
            why = ", ".join(errors) or f"no remote prefill in {WARM_WITHIN:g} s"
            raise Unavailable(f"the graph does not serve: {why}") from None

    async def _harm(
        self, name: str, fault: Fault, rounds: Sequence[Sequence[Victim]], load: Load
    ) -> float | None:
        """Seconds from the fault's end to the recovery, the longest of all rounds; None where it did not recover
        in time."""
        gone: set[str] = set()
        slowest = 0.0
        for victims in rounds:
            hit = ", ".join(f"{one.name} (group {one.group})" for one in victims)
            self._say(f"{name}: {hit}, {load.in_flight} requests in flight")
            if fault == KILLED_FRONTEND:
                load.frontend_dies(await self._ports_of_others(victims))
            async with injected(fault.kind, victims, self._running.graph.pid, self._running.state_dir):
                if fault.kind.lasts:
                    await asyncio.sleep(self._options.hold)
                else:
                    gone |= {one.name for one in victims}
            seconds = await self._recovery(name, gone, load)
            if seconds is None:
                return None
            slowest = max(slowest, seconds)
        return slowest

    async def _recovery(self, name: str, gone: set[str], load: Load) -> float | None:
        ended = time.monotonic()
        try:
            async with asyncio.timeout(self._options.recover_within):
                await self._watch.until_whole(gone, lambda missing: self._say(f"{name}: {missing}"))
                if self._remote:
                    await load.until(lambda one: one.prefill == "remote" and one.started > ended)
        except TimeoutError:
            self._say(f"{name}: not recovered after {self._options.recover_within:g} s")
            return None
        seconds = time.monotonic() - ended
        self._say(f"{name}: recovered after {seconds:.1f} s, {len(load.done)} requests so far")
        return seconds

    async def _ports_of_others(self, victims: Sequence[Victim]) -> set[int]:
        """Clients' ports of the connections that the other frontends hold."""
        dying = {one.name for one in victims}
        frontends = [one for one in await self._watch.instances() if one.role is Role.FRONTEND]
        others = [psutil.Process(one.pid) for one in frontends if one.id not in dying]
        return {end.raddr.port for one in others for end in one.net_connections("tcp") if end.raddr}


def _is_patient(fault: Fault | Scenario | None) -> bool:
    return fault.patient if isinstance(fault, Scenario) else fault == NOBODY_LEFT


def _troubles(row: Row) -> Iterator[str]:
    """One line for each request that went amiss, up to some, one for each instance that leaks, and what else
    there was."""
    yield from map(str, row.traces[:MOST_TOLD])
    if (more := len(row.traces) - MOST_TOLD) > 0:
        yield f"and {more} more: {'; '.join(row.errors)}"
    for one, held in row.held.items():
        yield f"{one} still holds {held} blocks"
    yield from row.amiss


@asynccontextmanager
async def chaos(running: Running, options: Options, say: Callable[[str], None]) -> AsyncIterator[Chaos]:
    """Raises RegistryUnavailable."""
    async with Watch() as watch:
        await watch.move(running.graph)
        yield Chaos(running, options, watch, say)
