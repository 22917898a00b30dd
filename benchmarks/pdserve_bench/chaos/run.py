"""Run the faults one after the other on a graph under load and score each."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pdserve.config.load import load as load_config
from pdserve.contract.records import Role
from pdserve.util.errors import Unavailable
from pdserve_bench.chaos import questions
from pdserve_bench.chaos.judge import too_long
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.questions import Case
from pdserve_bench.chaos.scene import Fault, Options, Scene
from pdserve_bench.chaos.scorecard import Row, score
from pdserve_bench.client import LoadClient
from pdserve_bench.graphs.launch import RunningGraph, started
from pdserve_bench.graphs.sections import Shape, read_sections, reshape, with_model
from pdserve_bench.graphs.simulated import write
from pdserve_bench.graphs.watch import GraphWatch, listed

logger = logging.getLogger(__name__)

NO_FAULT = "none"
WARM_WITHIN = 60.0
SETTLE = 10.0
"""Seconds after the last request until every KV block must be free: shorter than a KV lease (30 s)."""
SETTLE_AFTER_DEATH = 40.0
"""`SETTLE` if decode workers were killed: longer than a KV lease."""
UNKNOWN_LENGTH = 4096
"""Context length in tokens if the file does not set it."""
MAX_LOGGED = 8
"""Bad requests of a row that are logged; the scorecard's JSON has all."""


@asynccontextmanager
async def chaos(
    running: RunningGraph, options: Options, say: Callable[[str], None]
) -> AsyncIterator["Chaos"]:
    """Connect to the graph's etcd. Raises RegistryUnavailable."""
    async with GraphWatch() as watch:
        await watch.move(running.graph)
        yield Chaos(running, options, watch, say)


class Chaos:
    """A chaos run on a graph of this machine; `rows` yields the scorecard row by row."""

    def __init__(
        self, running: RunningGraph, options: Options, watch: GraphWatch, say: Callable[[str], None]
    ) -> None:
        self._running = running
        self._config = load_config(Path(running.graph.config))
        self._pool = list(options.pool)
        self._options = options
        self._watch = watch
        self._say = say
        self._remote = self._stand_in = False
        self._calm = 0.0

    async def rows(self) -> AsyncIterator[Row]:
        instances = await self._watch.learn()
        self._remote = any(instance.role.includes(Role.PREFILL) for instance in instances)
        self._stand_in = any(instance.is_stand_in for instance in instances)
        graph = self._running.graph
        self._say(f"{graph.model} at {graph.url}: {listed(self._watch.whole)}")
        lengths = [instance.max_model_len for instance in instances if instance.max_model_len]
        cases = await self._cases(min(lengths))
        left_out = questions.POOL - len(self._pool) if self._pool else 0
        calm = await self._while_it_lives(self._row(NO_FAULT, None, 0, cases))
        decode = self._config.decode
        doubt = questions.disagreement(left_out, decode and decode.engine_args.get("dtype"))
        yield replace(calm, left_out=left_out, amiss=(*calm.amiss, *([doubt] if doubt else [])))
        for turn, fault in enumerate(self._options.faults, 1):
            name = f"[{turn}/{len(self._options.faults)}] {fault.name}"
            try:
                yield await self._while_it_lives(self._row(name, fault, turn, cases))
            except Cannot as reason:
                self._say(f"{name}: skipped, {reason}")
                yield Row(fault.name, skipped=str(reason))

    async def _cases(self, max_model_len: int) -> Iterator[Case]:
        async def learn(cases: Iterator[Case]) -> list[Case]:
            graph = self._running.graph
            self._pool = self._pool or await learned(graph.url, graph.model, cases, self._options, self._say)
            return self._pool

        return await questions.known(self._config, max_model_len, self._options.seed, learn)

    async def _while_it_lives(self, work: Coroutine[None, None, Row]) -> Row:
        """Raises Unavailable if the graph's supervisor ends, because nothing is restarted then."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if not self._running.alive:
                    raise Unavailable("the graph's supervisor has ended")
                await asyncio.wait({task}, timeout=1)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _row(self, name: str, fault: Fault | None, turn: int, cases: Iterator[Case]) -> Row:
        options, graph = self._options, self._running.graph
        timeout = options.recover_within if fault and fault.patient else options.patience
        headers = fault.headers if fault else None
        started, recovered = time.monotonic(), 0.0 if fault is None else None

        def say(text: str) -> None:
            self._say(f"{name}: {text}")

        async with JudgedLoad(graph.url, graph.model, cases, options.concurrency, timeout, headers) as load:
            load.urls = self._running.urls
            await self._until_warm(load)
            began = time.monotonic()
            scene = Scene(
                self._running, self._config, self._watch, load, options, say, self._remote, turn, self._pool
            )
            if fault:
                recovered = await _played(fault, scene)
            await asyncio.sleep(max(0.0, started + options.seconds - time.monotonic()))
        say(f"{len(load.done)} requests; waiting until every KV block is free")
        left = await self._watch.leftovers(SETTLE_AFTER_DEATH if fault and fault.kills_decode else SETTLE)
        plain = fault.name if fault else NO_FAULT
        victims, seen = " ".join(scene.victims) or (plain if fault else ""), load.seen(plain, began)
        pause = max((request.pause or 0.0 for request in seen), default=0.0)
        if fault is None:
            self._calm = pause
        elif (
            fault.kills_decode
            and not fault.silent
            and self._stand_in
            and (late := too_long(pause, self._calm))
        ):
            scene.amiss.append(late)
        row = score(plain, victims, seen, recovered, left, scene.amiss)
        for trouble in _troubles(row):
            say(trouble)
        return row

    async def _until_warm(self, load: JudgedLoad) -> None:
        """Wait for as many good responses as there are clients, and for a remote prefill. Raises Unavailable."""
        try:
            async with asyncio.timeout(WARM_WITHIN):
                await load.until(lambda answer: not answer.error, self._options.concurrency)
                if self._remote:
                    await load.until(lambda answer: answer.prefill == "remote")
        except TimeoutError:
            errors = {attempt.error for attempt in load.done if attempt.error}
            why = ", ".join(errors) or f"no remote prefill in {WARM_WITHIN:g} s"
            raise Unavailable(f"the graph does not serve: {why}") from None


async def _played(fault: Fault, scene: Scene) -> float | None:
    """Inject the fault. If it fails, note its error in `amiss` and wait for the recovery. Raises Cannot if the fault is
    impossible and nothing is amiss."""
    try:
        return await fault.play(scene)
    except Exception as error:
        if isinstance(error, Cannot) and not scene.amiss:
            raise
        logger.exception("fault %s failed", fault.name)
        scene.amiss.append(f"the fault failed: {error!r}")
        scene.load.resume()
        return await scene.recovery()


async def learned(
    url: str, model: str, cases: Iterator[Case], options: Options, say: Callable[[str], None]
) -> list[Case]:
    """Return a pool of prompts, with the graph's outputs as the expected ones. Raises Unavailable."""
    say(f"asking the undisturbed graph at {url} for the expected outputs")
    pool = await questions.learn(LoadClient(url), model, cases, options.patience)
    say(f"{len(pool)} of {questions.POOL} prompts have the same output in a batch and alone; using these")
    return pool


async def of_one_engine(
    file: Path, folder: Path, dtype: str, options: Options, say: Callable[[str], None]
) -> list[Case]:
    """Return the pool with the outputs of a single engine; empty if outputs are computed. Raises Unavailable and
    ConfigError."""
    config = load_config(file, {})
    assert config.decode is not None
    if questions.simulated(config):
        return []
    alone = write(reshape(with_model(read_sections(file), config.model), Shape(0, 1)), folder / "one.yaml")
    longest = int(str(config.decode.engine_args.get("max-model-len", UNKNOWN_LENGTH)))
    lengths = questions.prompt_lengths(config, longest)
    async with started(alone, folder, say, dtype=dtype) as one:
        cases = questions.endless(lengths, options.seed)
        return await learned(one.graph.url, one.graph.model, cases, options, say)


def _troubles(row: Row) -> Iterator[str]:
    """Yield log lines: bad requests (at most `MAX_LOGGED`), workers that still hold blocks, and other findings."""
    yield from map(str, row.traces[:MAX_LOGGED])
    if (more := len(row.traces) - MAX_LOGGED) > 0:
        yield f"and {more} more: {'; '.join(row.errors)}"
    for instance, held in row.held.items():
        yield f"{instance} still holds {held} blocks"
    yield from row.amiss
