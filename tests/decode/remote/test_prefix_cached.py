"""A prompt goes to the prefill worker that has its prefix cached. If this worker does not begin in time, any worker
may compute the prompt."""

import asyncio
import time
from typing import Any

import pytest

from pdserve.contract.messages import (
    RETURNED,
    PrefillFailed,
    PrefillPrefixes,
    PrefillRequest,
    PrefixesChanged,
)
from pdserve.contract.prefixes import block_names
from pdserve.decode.policy import cost
from tests.conditions import until
from tests.decode.graph import LONG, ActedPrefill, Answered, FrontendStream, Prefill, WorkerGraph

CACHED = ("remote", "prefix-cached")
SLOW: dict[str, Any] = {"prefill-rate": 5000.0}
"""500 tokens take 100 ms."""


def continued(prompt: list[int], by: int = 40) -> list[int]:
    return [*prompt, *range(1000, 1000 + by)]


def hop(answered: Answered, name: str) -> Any:
    assert answered.placed is not None
    return next(hop for hop in answered.placed.hops if hop.name == name)


async def test_a_prompt_goes_to_the_worker_that_computed_its_prefix(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    prefill = [await graph.prefill(f"prefill-{number}", **SLOW) for number in range(2)]
    prompts = [list(range(100 * first, 100 * first + 500)) for first in (10, 20, 30, 40)]
    first = [await frontend.ask(prompt) for prompt in prompts]
    assert [answered.way for answered in first] == [("remote", "long")] * 4
    for prompt, before in zip(prompts, first, strict=True):
        answered = await frontend.ask(continued(prompt))
        assert answered.way == CACHED
        assert hop(answered, "prefill").instance == hop(before, "prefill").instance
        assert answered.placed is not None
        assert answered.placed.cached >= 480
        assert f"{hop(before, 'prefill').instance} has 496 tokens cached" in hop(answered, "queue").why
    for each in prefill:
        await each.frees_all()
    await graph.frees_all()


async def test_a_worker_reports_prefixes_of_other_decode_workers_prompts(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    """A worker reports from its first prefix hit on, because before the hit no prompts share a prefix."""
    idle, prefill = [await graph.prefill(f"prefill-{number}", **SLOW) for number in range(2)]
    reports = (await graph.queue()).prefixes()
    await prefill.engine.prefill("of another", LONG, prefill.engine.plain_body(1))
    await until(lambda: prefill.engine.prefixes.known() != [])
    prefill.worker._prompts.prefix_reports.last_hit = time.monotonic()
    report = await anext(reports)
    assert (report.worker, report.changed.whole) == ("prefill-1", True)
    answered = await frontend.ask(continued(LONG))
    assert answered.way == CACHED
    assert hop(answered, "prefill").instance == "prefill-1"
    assert idle.engine.prefixes.changes("decode workers") == ([], []), "it has nothing to report"


async def test_the_index_has_at_most_the_blocks_of_the_workers_cache(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    await graph.prefill(**SLOW, num_gpu_blocks_override=64)
    for first in range(1, 5):
        await frontend.ask(list(range(1000 * first, 1000 * first + 500)))
    assert len(graph.decode._prefixes._index) == 64


class Preferred:
    """`acted` is a prefill worker that has LONG cached; the test answers its prompts. `other` computes prompts."""

    def __init__(self, graph: WorkerGraph, acted: ActedPrefill, other: Prefill) -> None:
        self.graph, self.acted, self.other = graph, acted, other
        self._prompts = acted.queue.addressed(acted.name)

    async def next(self) -> PrefillRequest:
        while (request := await anext(self._prompts)).warm_up:
            pass
        return request


@pytest.fixture
async def preferred(graph: WorkerGraph, acted: ActedPrefill) -> Preferred:
    other = await graph.prefill("prefill-0", **SLOW)
    names = list(block_names(LONG, 16))
    changed = PrefixesChanged(16, 1, names, [], whole=True)
    await acted.queue.report_prefixes(PrefillPrefixes(acted.name, changed))
    await until(lambda: len(graph.decode._prefixes._index) == len(names))
    return Preferred(graph, acted, other)


async def test_any_worker_computes_a_prompt_that_is_not_begun_in_time(
    preferred: Preferred, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "MIN_BEGIN", 0.05)
    asked = await frontend.submit(continued(LONG), client="someone")
    request = await preferred.next()
    assert 0 < request.begin_within < 5
    assert request.client == "someone"
    answered = await frontend.end_of(asked)
    assert answered.way == ("remote", "prefix-cached")
    assert hop(answered, "prefill").instance == "prefill-0"
    assert "prefill-x did not begin it" in hop(answered, "queue").why


@pytest.mark.parametrize("event", ["returned", "gone", "draining", "avoided"])
async def test_any_worker_computes_a_prompt_at_once_if_the_preferred_one_cannot(
    event: str, preferred: Preferred, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "MIN_BEGIN", 60.0)
    asked = await frontend.submit(continued(LONG))
    request = await preferred.next()
    match event:
        case "returned":
            await preferred.acted.answer(PrefillFailed(request.request_id, RETURNED))
        case "gone":
            await preferred.acted.leave()
        case "draining":
            await preferred.acted.register(draining=True)
        case "avoided":
            preferred.graph.decode._workers.avoid([preferred.acted.name])
            preferred.graph.decode._workers.give_up_gone()
    answered = await frontend.end_of(asked)
    assert hop(answered, "prefill").instance == "prefill-0"


async def test_a_prompt_that_is_held_again_is_not_lost_with_the_queue(
    preferred: Preferred, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, publish = preferred.graph, asyncio.Event()
    wait = graph.decode._publisher.wait

    async def held(*args: Any) -> bool:
        await publish.wait()
        return await wait(*args)

    monkeypatch.setattr(graph.decode._publisher, "wait", held)
    asked = await frontend.submit(continued(LONG))
    await preferred.next()
    await preferred.acted.answer(PrefillFailed(asked, RETURNED))
    await until(lambda: not graph.request(asked).preferred)
    graph.broker.losses += 1
    graph.decode._workers.give_up_lost()
    publish.set()
    assert hop(await frontend.end_of(asked), "prefill").instance == "prefill-0"


async def test_a_prompt_is_prefilled_locally_if_its_worker_dies_after_it_began(
    preferred: Preferred, frontend: FrontendStream
) -> None:
    asked = await frontend.submit(continued(LONG))
    await preferred.next()
    await preferred.acted.start(asked)
    await preferred.acted.leave()
    assert (await frontend.end_of(asked)).way == ("local", "fallback")


async def test_a_cancelled_prompt_is_withdrawn_from_its_worker(
    preferred: Preferred, frontend: FrontendStream
) -> None:
    notices = preferred.acted.queue.notices()
    asked = await frontend.submit(continued(LONG))
    await preferred.next()
    await frontend.cancel(asked)
    assert (await anext(notices)).request_ids == [asked]
    await until(lambda: not preferred.graph.decode.requests.of("frontend-0"))
