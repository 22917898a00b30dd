"""Prompts of a greedy client and of other clients at the prefill queue."""

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.contract.messages import PrefillDone
from pdserve.decode.remote.publisher import BUFFER, are_busy
from tests.conditions import until
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, WorkerGraph, failing, handle, shared_queue
from tests.decode.virtual import PULL_BELOW, SPEED, VirtualGraph

REMOTE = DecodeSection(
    remote_prefill=True, policy="threshold", max_local_prefill_length=0, max_prefill_queue_size=9999
)


async def flood(graph: WorkerGraph, frontend: FrontendStream, count: int = 4) -> list[str]:
    """Send prompts of a greedy client; return their ids when they wait for a prefill worker."""
    names = [await frontend.submit(LONG[number:], client="greedy") for number in range(count)]
    await until(lambda: graph.depth == count)
    return names


async def take(graph: WorkerGraph, acted: ActedPrefill) -> str:
    """Pull a prompt, as a prefill worker does; return its id."""
    [delivery] = await acted.pull()
    await delivery.ack()
    await acted.start(delivery.request.request_id)
    return delivery.request.request_id


async def test_clients_have_turns_and_flex_prompts_are_last(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    first, *greedy = await flood(graph, frontend)
    flex = await frontend.submit(LONG[9:], client="~batch")
    honest = await frontend.submit(LONG[50:], client="honest")
    await until(lambda: graph.depth == 5)
    assert [await take(graph, acted) for _ in range(6)] == [first, greedy[0], honest, *greedy[1:], flex]


async def test_flex_prompts_are_computed_one_at_a_time(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    flex = [await frontend.submit(LONG[number:], client="~batch") for number in range(2)]
    await until(lambda: graph.decode.requests.remote == 2)
    assert graph.decode.load().queue_depth < 2, "held flex prompts do not count"
    assert await take(graph, acted) == flex[0]
    ordinary = await frontend.submit(LONG[9:], client="honest")
    assert await take(graph, acted) == ordinary
    await acted.answer(PrefillDone(ordinary, handle(LONG[9:])))
    await until(lambda: frontend.answered[ordinary].placed is not None)
    assert shared_queue(graph.broker).stored == 0
    await acted.answer(PrefillDone(flex[0], handle(LONG)))
    assert await take(graph, acted) == flex[1]


async def test_held_prompts_count_as_queued(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    """The hop `queue` includes the time for which the decode worker held the prompt back."""
    names = await flood(graph, frontend)
    assert graph.decode.load().queue_depth == 4
    assert shared_queue(graph.broker).stored == 1
    assert (await frontend.end_of(await frontend.submit(LONG[9:], client="greedy"))).way == (
        "local",
        "queue-full",
    )
    for _ in names[1:]:
        await take(graph, acted)
    [delivery] = await acted.pull()
    await acted.answer(PrefillDone(names[3], handle(LONG[3:])))
    await until(lambda: frontend.answered[names[3]].placed is not None)
    placed = frontend.answered[names[3]].placed
    assert placed is not None
    assert placed.hops[0].name == "queue"
    assert placed.hops[0].seconds >= delivery.request.held > 0


async def test_a_held_prompt_that_is_cancelled_never_enters_the_queue(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    names = await flood(graph, frontend, 3)
    await frontend.cancel(names[1])
    await until(lambda: graph.depth == 2)
    assert [await take(graph, acted) for _ in range(2)] == [names[0], names[2]]
    assert graph.depth == 0


@pytest.mark.parametrize("reason", ["queue-down", "no-prefill-worker"])
async def test_held_prompts_are_prefilled_locally_when_no_worker_can_pull_them(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, reason: str
) -> None:
    names = await flood(graph, frontend)
    with failing(reason, 3 if reason == "queue-down" else 4):
        await (graph.broker.down() if reason == "queue-down" else acted.leave())
        for name in names[1:]:
            assert (await frontend.end_of(name)).way == ("local", "fallback")


@pytest.mark.usefixtures("acted", "hasty")
async def test_held_prompts_time_out_as_if_they_were_in_the_queue(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    for name in await flood(graph, frontend):
        assert (await frontend.end_of(name)).way == ("local", "fallback")
    [queue] = [queue for queue in graph.broker._queues.values() if queue.ids]
    assert len(queue.ids) <= 2


@pytest.mark.parametrize(
    ("stored", "own", "tokens", "workers", "busy"),
    [
        (0, [], 5000, 1, False),
        (9, [], 5000, 1, False),  # all are of other decode workers; one own prompt is always allowed
        (1, [1300], 1300, 1, True),
        (1, [1300], 1300, 2, False),
        (2, [1300], 1300, 2, True),
        (1, [50], 50, 1, False),  # short prompts, which fill `BUFFER` together
        (9, [50] * 9, 50, 1, False),
        (9, [50] * 9, 51, 1, True),
        (9, [50] * 3, 50, 1, False),
        (12, [50] * 3, 50, 1, True),
    ],
)
def test_a_worker_publishes_just_enough_to_keep_the_prefill_workers_busy(
    stored: int, own: list[int], tokens: int, workers: int, busy: bool
) -> None:
    assert are_busy(stored, own, tokens, workers, BUFFER / 500) is busy


@pytest.mark.parametrize(
    ("prompt", "prefill", "decode"),
    [(60, 1, 1), (300, 3, 1), (300, 1, 2), (1300, 1, 1), (1300, 2, 3), (4000, 3, 1), (4000, 1, 2)],
)
def test_holding_a_flood_back_shortens_the_waits_of_others(prompt: int, prefill: int, decode: int) -> None:
    """In virtual time. The flood itself ends hardly later."""

    def flood(seed: int, *, turns: bool) -> tuple[float, float]:
        """Return the time of the last first token, and the honest client's longest wait for a prefill worker."""
        graph = VirtualGraph(REMOTE, prefill=prefill, decode=decode, turns=turns, seed=seed)
        for _ in range(count):
            graph.ask(prompt, 2, "greedy")
        for number in range(10):
            graph.after(one * (5 + 10 * number / prefill), lambda: graph.ask(prompt, 2, "honest"))
        graph.run(300)
        assert len(graph.done) == count + 10
        honest = [request for request in graph.done if request.client == "honest"]
        return max(each.times[0] for each in graph.done), max(each.pulled - each.begun for each in honest)

    count, one = prefill * max(160, 20_000 // prompt), 1.25 * prompt / SPEED.prefill_rate
    before, now = ([flood(seed, turns=turns) for seed in range(3)] for turns in (False, True))
    engine = 1.25 * (2 * PULL_BELOW + prompt) / SPEED.prefill_rate
    assert sum(ends for ends, _ in now) < 1.04 * sum(ends for ends, _ in before)
    for (_, waited), (_, waits) in zip(before, now, strict=True):
        assert waits < engine + (BUFFER + 2 * one) * max(1, decode / prefill)
        assert waits < 0.5 * waited
