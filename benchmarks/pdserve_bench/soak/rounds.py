"""A long soak: rounds of traffic with a restart in each, and a measurement of the idle graph after each."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from signal import Signals
from typing import cast

import psutil

from pdserve.util.errors import PdserveError, Unavailable
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts, find_endpoint, learn_prompts
from pdserve_bench.graphs.watch import GraphWatch, Leftovers
from pdserve_bench.measure.runs import LoadRun, OpenLoop, PoissonRequests, Workload
from pdserve_bench.measure.trace import Trace
from pdserve_bench.progress import say
from pdserve_bench.soak.forms import FORMS, POLL_INTERVAL, READY_WITHIN, SoakedGraph, harm
from pdserve_bench.soak.requests import MixedLoad
from pdserve_bench.soak.usage import Part, UsageSnapshot, early_and_late, leaks, measure_usage, nats_keeps

ROUND = 20.0
"""Seconds of traffic in a round."""
RESTART_AFTER = 5.0
"""Seconds of a round until a part is restarted."""
RATE = 4.0
"""Requests per second at speed 1, without a trace."""
PROMPT_TOKENS, ANSWER_TOKENS = 400, 24
"""Lengths without a trace."""
MIXED = 24
"""Requests of `MixedLoad` in each round."""
LENGTHS = (8, 1200)
"""Shortest and longest prompt of these requests, in tokens."""
TIMEOUT = 120.0
"""Seconds for each request."""
IDLE_WITHIN = 60.0
"""Seconds until an idle graph holds nothing: by then leases of killed processes and of KV have ended."""
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class ServiceEndpoint(Endpoint):
    """Sends each request to the frontend that `pick` returns."""

    pick: Callable[[], Endpoint] = field(kw_only=True)

    async def ask(self, exchange: Exchange, timeout: float) -> None:
        await self.pick().ask(exchange, timeout)


@dataclass(frozen=True)
class Traffic:
    prompts: Prompts
    trace: Trace | None
    speed: float
    seed: int

    def round(self, number: int) -> Workload:
        """Return the trace's requests in this round; without a trace, random ones. Prompts differ when the trace begins
        again."""
        if self.trace is None:
            requests = PoissonRequests(self.prompts, PROMPT_TOKENS, ANSWER_TOKENS, TIMEOUT)
            return requests.at(RATE * self.speed, ROUND, self.seed + number)
        times = cast(list[float], [request.timestamp for request in self.trace.requests])
        length = (max(times) - min(times)) / 1000 / self.speed
        turn, begin = divmod(number * ROUND, max(length, ROUND))
        arrivals = self.trace.replayed(self.speed, inf, self.seed + int(turn))
        window = [(due - begin, body) for due, body in arrivals if begin <= due < begin + ROUND]
        return OpenLoop(window, ROUND, TIMEOUT)


@dataclass
class SoakRounds:
    samples: list[UsageSnapshot] = field(default_factory=list)
    """Usage of the idle graph after each round."""
    done: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended, and restarts."""
    failures: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        growth = leaks(*early_and_late(self.samples)) if self.samples else ["nothing was measured"]
        return [*self.failures, *growth]

    def add(self, what: str, run: LoadRun, mixed: MixedLoad, left: Leftovers) -> None:
        self.done += mixed.done
        self.done["of the traffic, finished"] += len(run.of(Outcome.FINISHED))
        self.failures += [f"{what}: {count} failed: {text}" for text, count in run.errors()[:SHOWN_ERRORS]]
        self.failures += [f"{what}: {surprise}" for surprise in mixed.surprises[:SHOWN_ERRORS]]
        held = [f"{name} holds {blocks} KV blocks" for name, blocks in left.blocks.items()]
        queued = [f"{left.queued} prefills are queued"] * bool(left.queued)
        self.failures += [
            f"{what}, idle for {left.seconds:.0f} s: {text}" for text in (*held, *queued, *left.amiss)
        ]


async def soak_rounds(
    form: str, minutes: float, trace: Trace | None, speed: float, seed: int, folder: Path
) -> SoakRounds:
    """Raises ConfigError, and Unavailable if the graph does not start."""
    found = SoakRounds()
    async with FORMS[form](folder, say) as graph, GraphWatch() as watch:
        await watch.move(graph.graph)
        endpoint = await _endpoint_of(graph)
        prompts = await learn_prompts(endpoint, seed)
        if trace:
            trace = replace(trace.within(endpoint.max_model_len), tokens_per_word=prompts.tokens_per_word)
        traffic = Traffic(prompts, trace, speed, seed)
        await watch.learn()
        end = time.monotonic() + 60 * minutes
        for number in count():
            if time.monotonic() > end:
                break
            name, how = harm(number)
            what = f"round {number}, {how.name} of {name}"
            broken, run, mixed = False, LoadRun(), MixedLoad(graph.pick, LENGTHS, seed + number)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(
                        traffic.round(number).run(ServiceEndpoint(**vars(endpoint), pick=graph.pick), run)
                    )
                    group.create_task(mixed.run(MIXED))
                    group.create_task(restart(graph, watch, name, how))
            except* (PdserveError, psutil.Error) as errors:
                found.failures += [f"{what}: {error}" for error in errors.exceptions]
                broken = True
            if broken:
                break
            left = await watch.leftovers(IDLE_WITHIN)
            found.add(what, run, mixed, left)
            found.done[f"restarts of {name} by {how.name}"] += 1
            found.samples.append(await usage(graph, watch))
            say(f"{what}: {len(run.exchanges)} requests, idle after {left.seconds:.1f} s")
    return found


async def _endpoint_of(graph: SoakedGraph) -> Endpoint:
    """Wait until the model is listed: a frontend that is ready may still load it. Raises Unavailable."""
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        first = graph.pick()
        found = await find_endpoint(first.url, first.model, first.headers)
        if found.max_model_len:
            return found
        await asyncio.sleep(POLL_INTERVAL)
    raise Unavailable(f"no model is listed after {READY_WITHIN:g} s")


async def restart(graph: SoakedGraph, watch: GraphWatch, name: str, how: Signals) -> None:
    """Raises Unavailable if the part does not come back."""
    await asyncio.sleep(RESTART_AFTER)
    old = await _registered(graph, watch, name, None)
    await graph.end(name, how, old)
    await _registered(graph, watch, name, old.process)


async def _registered(graph: SoakedGraph, watch: GraphWatch, name: str, old: psutil.Process | None) -> Part:
    """Wait until a part runs in another process than `old`. Raises Unavailable."""
    deadline = time.monotonic() + READY_WITHIN
    while (part := graph.parts(await watch.instances()).get(name)) is None or part.process == old:
        if time.monotonic() > deadline:
            raise Unavailable(f"{name} is not registered after {READY_WITHIN:g} s")
        await asyncio.sleep(POLL_INTERVAL)
    return part


async def usage(graph: SoakedGraph, watch: GraphWatch) -> UsageSnapshot:
    stored = {"nats": await nats_keeps(graph.graph), "etcd": len(await watch.registry.read(""))}
    return await measure_usage(graph.parts(await watch.instances()), stored, graph.folders())
