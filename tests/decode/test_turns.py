"""Prompts in the engine at a time: as many as make one chunk."""

import asyncio

from pdserve.decode.turns import PromptTurns


class Prompts:
    """Tasks that are in the engine from their turn until `leave`."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.turns = PromptTurns(lambda: self.chunk, chunk)
        self.inside: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, tokens: int) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, tokens))
        await asyncio.sleep(0)

    async def _stay(self, name: str, tokens: int) -> None:
        async with self.turns.turn(tokens, name.split()[0]):
            self.inside.append(name)
            await self.ends[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


async def test_a_long_prompt_is_alone() -> None:
    prompts = Prompts(100)
    await prompts.come("long", 5000)
    await prompts.come("longer", 9000)
    await prompts.come("shorter", 20)
    assert prompts.inside == ["long"]
    await prompts.leave("long")
    assert prompts.inside == ["longer"]
    await prompts.leave("longer")
    assert prompts.inside == ["shorter"]


async def test_a_long_prompt_is_alone_though_the_chunk_was_shorter_when_it_came() -> None:
    prompts = Prompts(100)
    prompts.chunk = 25
    for name in ("long", "longer", "longest"):
        await prompts.come(name, 5000)
    prompts.chunk = 100
    await prompts.leave("long")
    assert prompts.inside == ["longer"]


async def test_a_very_short_prompt_passes_a_long_one_whatever_its_chunk() -> None:
    prompts = Prompts(100)
    prompts.chunk = 25
    await prompts.come("greedy 1", 5000)
    await prompts.come("a 1", 10)
    assert prompts.inside == ["greedy 1", "a 1"]


async def test_very_short_prompts_pass_a_long_one_of_another_client() -> None:
    """One of each client that has none in the engine, and four at a time."""
    prompts = Prompts(100)
    await prompts.come("greedy 1", 5000)
    await prompts.come("greedy 2", 10)
    for client in "abcde":
        await prompts.come(f"{client} 1", 10)
    await prompts.come("a 2", 10)
    assert prompts.inside == ["greedy 1", "a 1", "b 1", "c 1", "d 1"]
    await prompts.leave("a 1")
    await prompts.come("a 3", 10)
    assert prompts.inside == ["greedy 1", "b 1", "c 1", "d 1", "a 3"]
    await prompts.leave("greedy 1")
    assert prompts.inside == ["b 1", "c 1", "d 1", "a 3", "greedy 2", "e 1", "a 2"]


async def test_spare_prompts_pass_none_and_are_last() -> None:
    prompts = Prompts(100)
    await prompts.come("long", 5000)
    await prompts.come("~batch", 10)
    await prompts.come("b", 100)
    assert prompts.inside == ["long"]
    await prompts.leave("long")
    assert prompts.inside == ["b"]
    await prompts.leave("b")
    assert prompts.inside == ["~batch"]


async def test_no_prompt_waits_for_a_spare_one_that_is_computed() -> None:
    prompts = Prompts(100)
    for name in ("~batch", "~other", "a", "b"):
        await prompts.come(name, 5000)
    assert prompts.inside == ["~batch", "a"]
    await prompts.leave("~batch")
    assert prompts.inside == ["a"]
    await prompts.leave("a")
    assert prompts.inside == ["b"]


async def test_short_prompts_make_a_chunk_together() -> None:
    prompts = Prompts(100)
    for name in "abcd":
        await prompts.come(name, 40)
    assert prompts.inside == ["a", "b"]
    await prompts.leave("b")
    assert prompts.inside == ["a", "c"]


async def test_a_prompt_that_is_given_up_in_line_holds_up_no_other() -> None:
    prompts = Prompts(100)
    await prompts.come("a", 80)
    await prompts.come("b", 80)
    await prompts.come("c", 20)
    assert prompts.inside == ["a"]
    prompts.tasks["b"].cancel()
    await asyncio.gather(prompts.tasks["b"], return_exceptions=True)
    await asyncio.sleep(0)
    assert prompts.inside == ["a", "c"]
    await prompts.leave("a")
    await prompts.leave("c")
    await prompts.come("d", 100)
    assert prompts.inside == ["d"]


async def test_without_a_chunk_there_are_no_turns() -> None:
    prompts = Prompts(0)
    for name in "abc":
        await prompts.come(name, 5000)
    assert prompts.inside == ["a", "b", "c"]


async def test_turns_go_round_the_clients() -> None:
    prompts = Prompts(100)
    for name in ("greedy 1", "greedy 2", "greedy 3", "honest 1", "honest 2", "other 1"):
        await prompts.come(name, 5000)
    order = []
    while prompts.inside:
        order += prompts.inside
        await prompts.leave(prompts.inside[0])
    assert order == ["greedy 1", "greedy 2", "honest 1", "other 1", "greedy 3", "honest 2"]
