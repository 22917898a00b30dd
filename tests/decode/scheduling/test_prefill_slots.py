"""The engine gets as many prompts at a time as fill one chunk."""

import asyncio

import pytest

from pdserve.decode.scheduling.prefill_slots import PromptSlots


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            ["long:5000 longer:9000 shorter:20 | long", "-long | longer", "-longer | shorter"],
            id="a long prompt is alone",
        ),
        pytest.param(
            ["=25 long:5000 longer:5000 longest:5000 =100 -long | longer"],
            id="a long prompt stays alone when the chunk grows",
        ),
        pytest.param(
            ["=25 greedy1:5000 a1:10 | greedy1 a1"],
            id="a very short prompt passes a long one at any chunk",
        ),
        pytest.param(
            [
                "greedy1:5000 greedy2:10 a1:10 b1:10 c1:10 d1:10 e1:10 a2:10 | greedy1 a1 b1 c1 d1",
                "-a1 a3:10 | greedy1 b1 c1 d1 a3",
                "-greedy1 | b1 c1 d1 a3 greedy2 e1 a2",
            ],
            id="four very short prompts pass a long one, each of a client without another in the engine",
        ),
        pytest.param(
            ["long:5000 ~batch:10 b:100 | long", "-long | b", "-b | ~batch"],
            id="flex prompts pass no other and are last",
        ),
        pytest.param(
            ["~batch:5000 ~other:5000 a:5000 b:5000 | ~batch a", "-~batch | a", "-a | b"],
            id="no prompt waits for a running flex prompt",
        ),
        pytest.param(["a:40 b:40 c:40 d:40 | a b", "-b | a c"], id="short prompts make a chunk together"),
        pytest.param(
            ["a:80 b:80 c:20 | a", "!b | a c", "-a -c d:100 | d"],
            id="a prompt cancelled in the queue delays no other",
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
            id="round-robin over clients",
        ),
    ],
)
async def test_which_prompts_are_in_the_engine(story: list[str]) -> None:
    """`a1:40`: a prompt of client `a` with 40 tokens arrives; `-a1`: it leaves the engine; `!a1`: it is cancelled;
    `=25`: the chunk, 100 tokens at first, becomes 25; after `|`: prompts in the engine."""
    chunk, inside = 100, list[str]()
    ends, tasks = dict[str, asyncio.Event](), dict[str, asyncio.Task[None]]()
    slots = PromptSlots(lambda: chunk, chunk)

    async def stay(name: str, tokens: int) -> None:
        async with slots.take(tokens, name.rstrip("0123456789")):
            inside.append(name)
            await ends[name].wait()
            inside.remove(name)

    for step in story:
        words, _, expected = step.partition(" | ")
        for word in words.split():
            match word[0], word[1:]:
                case "-", name:
                    ends[name].set()
                    await tasks[name]
                case "!", name:
                    tasks[name].cancel()
                    await asyncio.wait([tasks[name]])
                case "=", tokens:
                    chunk = int(tokens)
                case _:
                    name, _, tokens = word.partition(":")
                    ends[name] = asyncio.Event()
                    tasks[name] = asyncio.create_task(stay(name, int(tokens)))
            await asyncio.sleep(0)
        assert inside == expected.split(), step


async def test_without_a_chunk_no_prompt_waits() -> None:
    slots = PromptSlots(lambda: 0, 0)
    async with slots.take(5000) as first, slots.take(5000) as second:
        assert [first, second] == [False, False]
