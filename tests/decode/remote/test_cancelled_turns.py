"""Prompts that are cancelled while they wait for their turn in the engine."""

from tests.conditions import until
from tests.decode.graph import WorkerGraph


async def test_they_leave_the_line_and_are_no_turns_of_their_client() -> None:
    """A client that gives up and tries again waits behind none of its own."""
    chunk = {"long-prefill-token-threshold": 512}
    async with WorkerGraph(max_local_prefill_length=8000, engine_args=chunk) as graph:
        graph.decode_engine.faults.slow = 30.0
        frontend = await graph.frontend()
        await frontend.submit(list(range(3, 4003)), client="b")
        await until(lambda: bool(graph.decode.requests))
        gone = [await frontend.submit([n, *range(1000, 2000)], client="a") for n in range(10)]
        others = [await frontend.submit([n, *range(3000, 4000)], client="b") for n in range(3)]
        await until(lambda: len(graph.decode.requests) == 14)
        for each in gone:
            await frontend.cancel(each)
        await until(lambda: len(graph.decode.requests) == 4)
        again = await frontend.submit([7, *range(5000, 6000)], client="a")
        await until(lambda: bool(frontend.answered[again].tokens), 30)
        assert sum(bool(frontend.answered[each].tokens) for each in others) <= 1
