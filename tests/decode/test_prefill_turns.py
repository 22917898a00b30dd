"""Prompts of a greedy client and of others at the prefill queue."""

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.decode.prefill_turns import AHEAD, enough
from pdserve.messages import PrefillDone, PrefillStarted, Submit
from tests.conditions import until
from tests.decode.graph import Answered, FrontendStream, WorkerGraph, shared_queue
from tests.decode.test_worker import LONG, act_prefill, expected, failures, handle
from tests.decode.virtual import PULL_BELOW, SPEED, VirtualGraph
from tests.engine.sims import LOADED, body

REMOTE = DecodeSection(
    remote_prefill=True, policy="threshold", max_local_prefill_length=0, max_prefill_queue_size=9999
)


async def ask(frontend: FrontendStream, client: str, count: int = 1) -> list[str]:
    """Send so many long prompts of a client; return their ids."""
    names = [f"{client}-{number}" for number in range(count)]
    for number, name in enumerate(names):
        frontend.answered[name] = Answered()
        await frontend.client.send(Submit(name, LONG[number:], 30.0, body(), client=client))
    return names


async def flooded(graph: WorkerGraph, count: int = 6) -> tuple[FrontendStream, list[str]]:
    """A graph whose only prefill worker, `prefill-x`, the test acts, with so many prompts that wait for it."""
    frontend = await graph.frontend()
    names = await ask(frontend, "greedy", count)
    await until(lambda: graph.depth == count)
    return frontend, names


async def test_a_prompt_waits_for_about_one_of_another_client() -> None:
    async with WorkerGraph(max_prefill_queue_size=9) as graph:
        await act_prefill(graph)
        frontend, _ = await flooded(graph)
        await ask(frontend, "honest")
        await until(lambda: graph.depth == 7)
        queue, order = await graph.queue(), []
        for _ in range(7):
            [delivery] = await queue.pull(1, 5.0)
            await delivery.ack()
            order.append(delivery.request.request_id)
            await queue.answer("decode-0", PrefillStarted(order[-1], "prefill-x"))
        assert "honest-0" in order[:3]
        assert [name for name in order if name != "honest-0"] == [f"greedy-{number}" for number in range(6)]


async def test_what_is_held_counts_as_queued_and_is_in_the_receipt() -> None:
    async with WorkerGraph(max_prefill_queue_size=4) as graph:
        await act_prefill(graph)
        frontend, names = await flooded(graph, 4)
        assert graph.decode.load().queue_depth == 4
        assert shared_queue(graph.broker).stored == 1
        local = await frontend.ask(LONG[9:])
        assert local.way == ("local", "queue-full")
        queue = await graph.queue()
        for name in names:
            [delivery] = await queue.pull(1, 5.0)
            await queue.answer("decode-0", PrefillStarted(name, "prefill-x"))
        prompt = LONG[3:]
        await queue.answer("decode-0", PrefillDone(names[3], handle(prompt)))
        await until(lambda: frontend.answered[names[3]].placed is not None)
        placed = frontend.answered[names[3]].placed
        assert placed is not None
        assert delivery.request.held > 0
        assert placed.hops[0].name == "queue"
        assert placed.hops[0].seconds == pytest.approx(delivery.request.held, abs=1e-6)


async def test_a_held_prompt_that_is_cancelled_never_enters_the_queue() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        frontend, names = await flooded(graph, 3)
        await frontend.cancel(names[1])
        await until(lambda: graph.depth == 2)
        queue = await graph.queue()
        for name in (names[0], names[2]):
            [delivery] = await queue.pull(1, 5.0)
            assert delivery.request.request_id == name
            await queue.answer("decode-0", PrefillStarted(name, "prefill-x"))
        assert graph.depth == 0


@pytest.mark.parametrize("reason", ["queue-down", "no-prefill-worker"])
async def test_held_prompts_are_computed_here_when_none_will_take_them(reason: str) -> None:
    async with WorkerGraph() as graph:
        registry = await act_prefill(graph)
        frontend, names = await flooded(graph, 4)
        before = failures(reason)
        if reason == "queue-down":
            await graph.broker.down()
        else:
            await registry.delete("instances/prefill/prefill-x")
        for number, name in enumerate(names[1:], 1):
            assert (await frontend.end_of(name)).tokens == expected(LONG[number:], 4)
        assert failures(reason) >= before + 3


async def test_held_prompts_do_not_wait_one_after_the_other_for_a_worker_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has the time that it would have had in the queue."""
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.2)
    monkeypatch.setattr("pdserve.decode.policy.SLACK", 0.0)
    async with WorkerGraph(max_prefill_queue_size=9) as graph:
        await act_prefill(graph)
        frontend, names = await flooded(graph)
        before = failures("timeout")
        for name in names:
            assert (await frontend.end_of(name)).way == ("local", "fallback")
        assert failures("timeout") >= before + 2
        published = [name for name in names if name in graph.broker.queue("pdserve", f"demo+{LOADED}").ids]
        assert len(published) <= 2


@pytest.mark.parametrize(
    ("queued", "own", "tokens", "workers", "full"),
    [
        (0, [], 5000, 1, False),
        (9, [], 5000, 1, False),  # of other decode workers: one of each is always there
        (1, [1300], 1300, 1, True),
        (1, [1300], 1300, 2, False),
        (2, [1300], 1300, 2, True),
        (1, [50], 50, 1, False),  # short ones, as many as take `AHEAD` together
        (9, [50] * 9, 50, 1, False),
        (9, [50] * 9, 51, 1, True),
        (9, [50] * 3, 50, 1, False),
        (12, [50] * 3, 50, 1, True),
    ],
)
def test_as_much_is_published_as_keeps_the_prefill_workers_busy(
    queued: int, own: list[int], tokens: int, workers: int, full: bool
) -> None:
    assert enough(queued, own, tokens, workers, AHEAD / 500) is full


@pytest.mark.parametrize("prompt", [60, 300, 1300, 4000])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_a_flood_is_prefilled_as_fast_and_others_wait_for_little(
    prompt: int, prefill: int, decode: int
) -> None:
    """In virtual time."""

    def flood(seed: int, *, turns: bool) -> tuple[float, float]:
        """Return when the last prompt was done, and the longest wait of the honest client's for a prefill worker."""
        graph = VirtualGraph(REMOTE, prefill=prefill, decode=decode, turns=turns, seed=seed)
        for _ in range(count):
            graph.ask(prompt, 2, "greedy")
        for number in range(10):
            graph.after(one * (5 + 10 * number / prefill), lambda: graph.ask(prompt, 2, "honest"))
        graph.run(300)
        assert len(graph.done) == count + 10
        honest = [request for request in graph.done if request.client == "honest"]
        return max(each.times[0] for each in graph.done), max(each.pulled - each.begun for each in honest)

    count, one = prefill * max(160, 30_000 // prompt), 1.25 * prompt / SPEED.prefill_rate
    before, now = ([flood(seed, turns=turns) for seed in range(3)] for turns in (False, True))
    engine = 1.25 * (PULL_BELOW + prompt) / SPEED.prefill_rate
    assert sum(ends for ends, _ in now) < 1.04 * sum(ends for ends, _ in before)
    for (_, waited), (_, waits) in zip(before, now, strict=True):
        assert waits < engine + (AHEAD + 2 * one) * max(1, decode / prefill)
        assert waits < 0.5 * waited
