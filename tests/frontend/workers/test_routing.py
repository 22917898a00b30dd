"""Two frontends that route by the prefix caches of two decode workers with simulated engines."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import pytest_asyncio

from pdserve.contract.records import Instance, Role, encode_record
from pdserve.contract.slo import NO_SLO, SloTargets
from pdserve.frontend.workers.pool import WorkerPool
from pdserve.process.worker import EngineWorker
from pdserve.registry import keys
from tests.conditions import until
from tests.decode.graph import Started
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_workers
from tests.frontend.workers.test_router import generation
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16
SYSTEM_PROMPT = [300 + 7 * number % 600 for number in range(20 * BLOCK)]


@dataclass
class Routing:
    frontends: list[Graph]
    registry: MemoryRegistry
    workers: list[Started[EngineWorker]] = field(default_factory=list)

    @asynccontextmanager
    async def two_workers(self, policy: str = "kv") -> AsyncIterator[None]:
        first, second = self.frontends
        await until(
            lambda: (
                not (first.models.usable_workers().get("demo") or second.models.usable_workers().get("demo"))
            )
        )
        async with sim_workers(first, 2) as self.workers:
            await until(lambda: second.models.usable_workers().get("demo") == 2)
            await self.route(policy)
            yield

    async def route(self, policy: str) -> None:
        await self.registry.put(keys.setting("router"), policy.encode())
        await until(lambda: all(frontend.processor().workers.policy == policy for frontend in self.frontends))

    async def told(self) -> None:
        """Wait until the frontends know what is cached, and that nothing runs. A load that was reported during the
        requests would make one worker seem fuller."""

        def known() -> bool:
            cached = {worker.id: set(worker.engine.prefixes.known()) for worker in self.workers}
            pools = [frontend.processor().workers for frontend in self.frontends]
            if any(link.outstanding(len(pools)) for each in pools for link in each._links.values()):
                return False
            return all(
                {name: each._prefixes._reported.get(name, (0, set()))[1] for name in cached} == cached
                for each in pools
            )

        await until(known)

    async def ask(self, prompt: list[int], tokens: int = 20, at: int = 0) -> tuple[str, list[int], int]:
        """Return the worker, the answer's tokens, and how many prompt tokens were cached there."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "return_token_ids": True}
        answer = await self.frontends[at].http.post("/v1/completions", json=body | {"temperature": 0})
        (choice,) = answer.raise_for_status().json()["choices"]
        return (
            answer.headers["x-pdserve-instance"],
            choice["token_ids"],
            int(answer.headers["x-pdserve-cached-tokens"]),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Routing]:
    first, state = Graph(), tmp_path_factory.mktemp("state")
    frontends = [first, Graph("frontend-1-test", first.registry)]
    async with AsyncExitStack() as stack, MemoryRegistry(first.registry) as registry:
        for frontend in frontends:
            await frontend.start(stack, state)
            me = Instance(frontend.id, Role.FRONTEND)
            await registry.put(keys.instance(me), encode_record(me))
        yield Routing(frontends, registry)


async def test_conversations_return_to_their_worker_from_either_frontend(routed: Routing) -> None:
    prompts = [[*SYSTEM_PROMPT, *range(300 + 50 * user, 340 + 50 * user)] for user in range(8)]
    homes: list[list[str]] = [[] for _ in prompts]
    async with routed.two_workers():
        for turn in range(4):
            before = [len(prompt) for prompt in prompts]
            answers = await asyncio.gather(
                *(routed.ask(prompt, at=(user + turn) % 2) for user, prompt in enumerate(prompts))
            )
            await routed.told()
            for user, (worker, answer, cached) in enumerate(answers):
                homes[user].append(worker)
                if turn:  # all but the new tokens and the last block are cached
                    assert cached >= (before[user] - 30 - BLOCK) // BLOCK * BLOCK
                prompts[user] += [*answer, *range(500 + 10 * user, 510 + 10 * user)]
    assert all(len(set(home)) == 1 for home in homes)
    assert min(Counter(home[0] for home in homes).values()) >= 3, (
        "the common prefix does not bring all to one worker"
    )


async def test_a_hot_prefix_spreads_when_its_worker_has_more_to_do(routed: Routing) -> None:
    async with routed.two_workers():
        first, _, _ = await routed.ask([*SYSTEM_PROMPT, 301])
        await routed.told()
        again, _, cached = await routed.ask([*SYSTEM_PROMPT, 302], at=1)
        assert (again, cached) == (first, len(SYSTEM_PROMPT))
        prompts = [[*SYSTEM_PROMPT, 303 + user] for user in range(20)]
        answers = await asyncio.gather(
            *(routed.ask(prompt, 200, at=user % 2) for user, prompt in enumerate(prompts))
        )
    assert min(Counter(worker for worker, _, _ in answers).values()) >= 6


async def test_a_dead_workers_entries_are_removed_and_its_successor_has_none(routed: Routing) -> None:
    prompt = SYSTEM_PROMPT[: 10 * BLOCK]
    async with routed.two_workers():
        home, _, _ = await routed.ask(prompt)
        await routed.told()
        assert (await routed.ask(prompt))[0] == home
        (lost,) = [worker for worker in routed.workers if worker.id == home]
        routed.workers.remove(lost)
        lost.life.cancel()
        await until(lambda: len(routed.frontends[0].processor().workers._prefixes) == 0)
        other, _, cached = await routed.ask(prompt)
        assert (other, cached) == (routed.workers[0].id, 0)
        async with sim_workers(routed.frontends[0], 1) as back:
            routed.workers += back
            await routed.told()
            assert (await routed.ask(prompt))[0] == other


async def test_prefixes_are_reported_and_kept_only_for_the_policy_kv(routed: Routing) -> None:
    def followed() -> bool:
        return any(worker.engine.prefixes._changed for worker in routed.workers)

    prompt = SYSTEM_PROMPT[: 10 * BLOCK]
    async with routed.two_workers("least-loaded"):
        kept = routed.frontends[0].processor().workers._prefixes
        for _ in range(2):
            await routed.ask(prompt)
        assert not followed()
        await routed.route("kv")
        await routed.told()
        assert len(kept) > 0
        await routed.route("least-loaded")
        assert len(kept) == 0
        await until(lambda: not followed())
        await routed.ask(prompt)
        assert len(kept) == 0


async def test_prompts_that_begin_alike_and_come_at_once_go_to_one_worker(routed: Routing) -> None:
    """When the later prompts come, the worker's cache has nothing to report yet."""
    async with routed.two_workers():
        await routed.told()
        found = await asyncio.gather(*(routed.ask([*SYSTEM_PROMPT, last]) for last in range(3, 6)))
        assert len({worker for worker, _, _ in found}) == 1


async def test_a_request_with_a_promise_goes_to_a_worker_that_should_keep_it(routed: Routing) -> None:
    async with routed.two_workers("round-robin"):
        pool = routed.frontends[0].processor().workers
        one, slow = (pool._links[worker.id] for worker in routed.workers)
        await until(lambda: bool(one.load.token_seconds and slow.load.token_seconds))
        slow.update_load(msgspec.structs.replace(slow.load, gap_seconds=0.5))
        chosen = {promised: picked(pool, promised) for promised in (NO_SLO, SloTargets(gap=0.06))}
    assert chosen[NO_SLO] == {one.instance: 5, slow.instance: 5}
    assert chosen[SloTargets(gap=0.06)] == {one.instance: 10}


def picked(pool: WorkerPool, promised: SloTargets) -> Counter[str]:
    asks = generation([1, 2, 3])
    asks.state.promised = promised
    links = [pool.pick(asks, only_others=False) for _ in range(10)]
    return Counter(link.instance for link in links if link is not None)
