"""Prompts that are cancelled while they wait for a slot in the engine."""

from tests.conditions import until
from tests.decode.graph import WorkerGraph


async def test_cancelled_prompts_cost_their_client_no_turn() -> None:
    """A client cancels its requests and tries again. The new request does not wait behind the cancelled ones."""
    chunk = {"long-prefill-token-threshold": 512}
    async with WorkerGraph(max_local_prefill_length=8000, engine_args=chunk) as graph:
        graph.decode_engine.faults.slow = 30.0
        frontend = await graph.frontend()
        await frontend.submit(list(range(3, 4003)), client="b")
        await until(lambda: bool(graph.decode.requests))
        cancelled = [await frontend.submit([n, *range(1000, 2000)], client="a") for n in range(10)]
        others = [await frontend.submit([n, *range(3000, 4000)], client="b") for n in range(3)]
        await until(lambda: len(graph.decode.requests) == 14)
        for each in cancelled:
            await frontend.cancel(each)
        await until(lambda: len(graph.decode.requests) == 4)
        again = await frontend.submit([7, *range(5000, 6000)], client="a")
        await until(lambda: bool(frontend.answered[again].tokens), 30)
        assert sum(bool(frontend.answered[each].tokens) for each in others) <= 1
