"""Prompts in the engine at a time: as many as make one chunk."""

import asyncio

import pytest

from pdserve.decode.turns import PromptTurns


class Prompts:
    """Tasks that are in the engine from their turn until `leave`. A prompt's name begins with its client's."""

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
        async with self.turns.turn(tokens, name.rstrip("0123456789")):
            self.inside.append(name)
            await self.ends[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def give_up(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await asyncio.sleep(0)

    async def play(self, word: str) -> None:
        """`a1:40`: comes, with so many tokens; `-a1`: leaves; `!a1`: is given up; `=25`: the chunk is so long."""
        match word[0], word[1:]:
            case "-", name:
                await self.leave(name)
            case "!", name:
                await self.give_up(name)
            case "=", tokens:
                self.chunk = int(tokens)
            case _:
                name, _, tokens = word.partition(":")
                await self.come(name, int(tokens))


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            ["long:5000 longer:9000 shorter:20 | long", "-long | longer", "-longer | shorter"],
            id="a long prompt is alone",
        ),
        pytest.param(
            ["=25 long:5000 longer:5000 longest:5000 =100 -long | longer"],
            id="a long prompt is alone though the chunk was shorter when it came",
        ),
        pytest.param(
            ["=25 greedy1:5000 a1:10 | greedy1 a1"],
            id="a very short prompt passes a long one whatever its chunk",
        ),
        pytest.param(
            [
                "greedy1:5000 greedy2:10 a1:10 b1:10 c1:10 d1:10 e1:10 a2:10 | greedy1 a1 b1 c1 d1",
                "-a1 a3:10 | greedy1 b1 c1 d1 a3",
                "-greedy1 | b1 c1 d1 a3 greedy2 e1 a2",
            ],
            id="very short prompts pass: one of each client that has none in the engine, and four at a time",
        ),
        pytest.param(
            ["long:5000 ~batch:10 b:100 | long", "-long | b", "-b | ~batch"],
            id="spare prompts pass none and are last",
        ),
        pytest.param(
            ["~batch:5000 ~other:5000 a:5000 b:5000 | ~batch a", "-~batch | a", "-a | b"],
            id="no prompt waits for a spare one that is computed",
        ),
        pytest.param(["a:40 b:40 c:40 d:40 | a b", "-b | a c"], id="short prompts make a chunk together"),
        pytest.param(
            ["a:80 b:80 c:20 | a", "!b | a c", "-a -c d:100 | d"],
            id="a prompt that is given up in line holds up no other",
        ),
        pytest.param(
            [
                "greedy1:5000 greedy2:5000 greedy3:5000 honest1:5000 honest2:5000 other1:5000 | greedy1",
                "-greedy1 | greedy2",
                "-greedy2 | honest1",
                "-honest1 | other1",
                "-other1 | greedy3",
                "-greedy3 | honest2",
            ],
            id="turns go round the clients",
        ),
    ],
)
async def test_which_prompts_are_in_the_engine(story: list[str]) -> None:
    prompts = Prompts(100)
    for step in story:
        words, _, inside = step.partition(" | ")
        for word in words.split():
            await prompts.play(word)
        assert prompts.inside == inside.split(), step


async def test_without_a_chunk_there_are_no_turns() -> None:
    prompts = Prompts(0)
    for name in "abc":
        await prompts.come(name, 5000)
    assert prompts.inside == ["a", "b", "c"]
