"""Two frontends that route to two decode workers with simulated engines, over streams in memory."""

import asyncio
from collections import Counter
from itertools import count
from typing import Self

import msgspec
import pytest

from pdserve.config.host import VLLM_VERSION
from pdserve.config.schema import DecodeConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.frontend.edge.trace import RequestTrace
from pdserve.frontend.model.generation import Generation
from pdserve.frontend.model.link import Link
from pdserve.frontend.model.vllm_api import EngineCoreRequest
from pdserve.frontend.model.workers import WorkerPool
from pdserve.messages import Outputs, Submit, ToFrontend
from pdserve.prefixes import CachedPrefixes
from pdserve.records import Instance, Role
from pdserve.slo import NO_PROMISE, Promised
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until
from tests.decode.graph import Seams, Started, config
from tests.engine.sims import body, decode_outputs

_numbers = count()
BLOCK = 16


class RoutingFrontend:
    """Sends requests where its pool says, and reads the answers."""

    def __init__(self, name: str, policy: str = "kv") -> None:
        self.pool = WorkerPool(policy, VLLM_VERSION, lambda address: TcpStreamClient(address, name), self)
        self._answers: dict[str, tuple[Generation, list[int], asyncio.Event]] = {}

    def link_up(self, link: Link) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None: ...

    def hand_over(self, link: Link, *, begun: bool) -> None: ...

    def received(self, link: Link, message: ToFrontend) -> None:
        if isinstance(message, Outputs):
            for output in decode_outputs(message.body).outputs:
                generation, cached, over = self._answers[output.request_id]
                generation.add_tokens(output.new_token_ids)
                if output.prefill_stats is not None:
                    cached.append(output.prefill_stats.num_cached_tokens)
                if output.finish_reason is not None:
                    generation.detach()
                    over.set()

    async def ask(self, prompt: list[int], max_tokens: int = 20) -> tuple[str, list[int], int]:
        """The worker, the answer, and how many of the prompt's tokens were cached there."""
        generation = Generation(request(prompt), trace(), size=len(prompt) + max_tokens)
        link, name = self.pool.pick(generation, only_others=False), f"r{next(_numbers)}"
        assert link is not None
        cached: list[int] = []
        over = asyncio.Event()
        self._answers[name] = generation, cached, over
        generation.attach(link, name)
        link.post(Submit(name, prompt, 30.0, body(max_tokens)))
        async with asyncio.timeout(60):
            await over.wait()
        return link.instance, generation.tokens, cached[0]


def trace() -> RequestTrace:
    return RequestTrace("r", "/v1/completions", 0.0)


def request(prompt: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=None,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Workers(Seams):
    """And frontends that route to them."""

    def __init__(self, *names: str) -> None:
        super().__init__(config(DecodeConfig()))
        self._names = names
        self.workers: dict[str, Started[DecodeWorker]] = {}
        self._instances: dict[str, Instance] = {}
        self.frontends: list[RoutingFrontend] = []

    async def __aenter__(self) -> Self:
        for name in self._names:
            await self.add(name)
        return self

    async def add(self, name: str) -> None:
        self.workers[name] = started = await self.start(self.make(DecodeWorker, name))
        assert isinstance(started.worker._stream, TcpStreamServer)
        address = started.worker._stream.address
        self._instances[name] = Instance(
            name, Role.DECODE, address=address, kv_tokens=2048 * BLOCK, vllm_version=VLLM_VERSION
        )
        await self.tell()

    async def kill(self, name: str) -> None:
        self.workers.pop(name).life.cancel()
        del self._instances[name]
        await self.tell()

    async def frontend(self, name: str, policy: str = "kv") -> RoutingFrontend:
        frontend = RoutingFrontend(name, policy)
        self.frontends.append(frontend)
        self._stack.push_async_callback(frontend.pool.close)
        await self.tell()
        return frontend

    @property
    def caches(self) -> dict[str, CachedPrefixes]:
        return {name: started.engine.prefixes for name, started in self.workers.items()}

    async def tell(self) -> None:
        """What the registry would tell."""
        for frontend in self.frontends:
            frontend.pool.update(self._instances.values(), len(self.frontends))
        await until(lambda: all(frontend.pool.live == len(self.workers) for frontend in self.frontends))

    async def told(self) -> None:
        """Until the frontends know what is cached, and that nothing runs: a report from the midst of the requests
        would make one worker seem the fuller for a while."""

        def known() -> bool:
            names = {name: set(cache.known()) for name, cache in self.caches.items()}
            indexes = [frontend.pool._prefixes for frontend in self.frontends]
            links = [link for frontend in self.frontends for link in frontend.pool._links.values()]
            if any(link.outstanding(len(self.frontends)) for link in links):
                return False
            return all({name: set(index.told(name)) for name in names} == names for index in indexes)

        await until(known)


async def test_conversations_return_to_their_blocks_whichever_frontend_has_them() -> None:
    system = list(range(1000, 1000 + 20 * BLOCK))
    prompts = [[*system, *range(3000 + 100 * user, 3000 + 100 * user + 40)] for user in range(8)]
    homes: list[list[str]] = [[] for _ in prompts]
    async with Workers("decode-a", "decode-b") as workers:
        frontends = [await workers.frontend("one"), await workers.frontend("two")]
        for turn in range(4):
            before = [len(prompt) for prompt in prompts]
            answers = await asyncio.gather(
                *(frontends[(user + turn) % 2].ask(prompt) for user, prompt in enumerate(prompts))
            )
            await workers.told()
            for user, (worker, answer, cached) in enumerate(answers):
                homes[user].append(worker)
                if turn:  # everything but the last block, and what is new
                    assert cached >= (before[user] - 30 - BLOCK) // BLOCK * BLOCK
                prompts[user] += [*answer, *range(5000 + 10 * user, 5010 + 10 * user)]
    assert all(len(set(home)) == 1 for home in homes)
    assert min(Counter(home[0] for home in homes).values()) >= 3, (
        "what all begin with does not bring all together"
    )


async def test_a_hot_prefix_spreads_when_its_worker_has_more_to_do() -> None:
    system = list(range(1000, 1000 + 20 * BLOCK))
    async with Workers("decode-a", "decode-b") as workers:
        frontends = [await workers.frontend("one"), await workers.frontend("two")]
        first, _, _ = await frontends[0].ask([*system, 1])
        await workers.told()
        again, _, cached = await frontends[1].ask([*system, 2])
        assert (again, cached) == (first, len(system))
        prompts = [[*system, 3 + user] for user in range(20)]
        answers = await asyncio.gather(
            *(frontends[user % 2].ask(prompt, 200) for user, prompt in enumerate(prompts))
        )
    assert min(Counter(worker for worker, _, _ in answers).values()) >= 6


async def test_a_worker_that_dies_takes_its_entries_away_and_comes_back_without() -> None:
    prompt = list(range(1000, 1000 + 10 * BLOCK))
    async with Workers("decode-a", "decode-b") as workers:
        frontend = await workers.frontend("one")
        home, _, _ = await frontend.ask(prompt)
        await workers.told()
        assert (await frontend.ask(prompt))[0] == home
        await workers.kill(home)
        await until(lambda: len(frontend.pool._prefixes) == 0)
        other, _, cached = await frontend.ask(prompt)
        assert (other, cached) == (*workers.workers, 0)
        await workers.add("decode-c")
        await workers.told()
        assert (await frontend.ask(prompt))[0] == other


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
async def test_nothing_is_told_or_kept_unless_the_router_is_kv(policy: str) -> None:
    prompt = list(range(1000, 1000 + 10 * BLOCK))
    async with Workers("decode-a", "decode-b") as workers:
        frontend = await workers.frontend("one", policy)
        await frontend.ask(prompt)
        await frontend.ask(prompt)
        assert not any(cache.followed for cache in workers.caches.values())
        frontend.pool.policy = "kv"
        await workers.told()
        assert len(frontend.pool._prefixes) > 0
        frontend.pool.policy = policy
        assert len(frontend.pool._prefixes) == 0
        await until(lambda: not any(cache.followed for cache in workers.caches.values()))
        await frontend.ask(prompt)
        assert len(frontend.pool._prefixes) == 0


async def test_a_promise_goes_to_the_worker_that_is_expected_to_keep_it() -> None:
    async with Workers("decode-a", "decode-b") as workers:
        frontend = await workers.frontend("one", "round-robin")
        links = frontend.pool._links
        await until(lambda: all(link.load.token_seconds for link in links.values()))
        slow = links["decode-b"]
        slow.take_load(msgspec.structs.replace(slow.load, gap_seconds=0.5))
        chosen = {promised: picked(frontend, promised) for promised in (NO_PROMISE, Promised(gap=0.06))}
    assert chosen == {NO_PROMISE: {"decode-a": 5, "decode-b": 5}, Promised(gap=0.06): {"decode-a": 10}}


def picked(frontend: RoutingFrontend, promised: Promised) -> Counter[str]:
    generation = Generation(request([1, 2, 3]), trace())
    generation.trace.promised = promised
    links = [frontend.pool.pick(generation, only_others=False) for _ in range(10)]
    return Counter(link.instance for link in links if link is not None)
