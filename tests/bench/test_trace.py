"""Traces are read strictly, and replayed with the lengths and shared prefixes that they have."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Outcome
from pdserve_bench.compare.trace import BLOCK, Trace, read_trace
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.runs import LoadRun, OpenLoop

from pdserve.errors import ConfigError
from tests.bench.answers import DONE, STREAM, Asked, event, tiny_server
from tests.conditions import until

ENDPOINT = Endpoint("http://127.0.0.1:1", "m")
WORD = 2.0
"""tokens per word in these tests"""
DUES = (0, 0.25, 0.5, 0.75)


def trace(folder: Path, *lines: "dict[str, Any] | str") -> Trace:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_trace(file)


def mooncake(at: float, tokens: int, blocks: list[int], answer: int = 8) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": answer, "hash_ids": blocks}


def words(found: Trace, number: int, salt: str = "s") -> list[str]:
    body = found.requests[number].body(ENDPOINT, WORD, salt, f"request {number}")
    return str(body["prompt"]).split()


def asked(found: Trace, rate: float, seconds: float, seed: int = 0) -> list[tuple[Any, ...]]:
    """The moment, the tokens of a word, the salt and the own name of each."""
    workload = found.at(rate, seconds, seed)
    assert isinstance(workload, OpenLoop)
    return [(due, *made.keywords.values()) for due, made in workload.requests]  # type: ignore[attr-defined]


def test_prefixes_are_shared_as_the_hash_ids_say(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        mooncake(0, 1300, [0, 1, 2]),
        mooncake(100, 1500, [0, 1, 3]),
        mooncake(200, 600, [9, 8]),
        mooncake(300, 600, []),
        mooncake(400, 600, []),
    )
    first, second, third, fourth, fifth = (words(found, number) for number in range(5))
    assert [len(each) for each in (first, second, third, fourth)] == [650, 750, 300, 300]
    common = 2 * BLOCK // 2
    assert first[:common] == second[:common]
    assert first[common : common + 5] != second[common : common + 5]
    assert len({tuple(each[:5]) for each in (first, third, fourth, fifth)}) == 4
    assert words(found, 0) == first, "the same prompt for each system that is compared"
    assert words(found, 0, "other")[:5] != first[:5]
    assert found.shared == pytest.approx(2 * BLOCK / (1300 + 1500 + 3 * 600))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "trace.jsonl:2: "),
        ({"input_length": "5", "output_length": 1}, "`$.input_length`"),
        ({"input_length": 0, "output_length": 1}, "`$.input_length`"),
        ({"input_length": 5}, "`output_length`"),
        ({"prompt": "Hello", "max_tokens": 5}, "`input_length`"),
        ("[1]", "Expected `object`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: "dict[str, Any] | str", problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trace(tmp_path, {"input_length": 5, "output_length": 1}, line)
    assert problem in str(raised.value)
    assert "trace.jsonl:2" in str(raised.value)


def test_requests_that_cannot_be_sent_are_left_out_and_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        trace(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    lines = [
        mooncake(0, 5000, []),
        mooncake(1000, 100, [], 0),
        mooncake(2000, 100, []),
        mooncake(3000, 90, []),
    ]
    found = trace(tmp_path, *lines).within(4096)
    assert [request.input_length for request in found.requests] == [100, 90]
    assert found.rate == pytest.approx(1.0)
    assert "; 2 left out: without an answer, or too long" in found.describe()
    with pytest.raises(ConfigError, match="all its requests are longer"):
        trace(tmp_path, *lines).within(64)


def test_requests_come_in_the_order_of_the_trace_which_begins_again(tmp_path: Path) -> None:
    found = trace(tmp_path, *(mooncake(100 * number, 100, []) for number in range(100)))
    assert found.rate == pytest.approx(10.0)
    few = asked(found, 5.0, 10.0)
    due = [at for at, *_ in few]
    assert due == sorted(due)
    assert due[-1] < 10.0
    names = [own for *_, own in few]
    first = int(names[0].removeprefix("request "))
    assert names == [f"request {(first + number) % 100}" for number in range(len(few))]
    assert len({salt for _, _, salt, _ in asked(found, 40.0, 10.0)}) >= 4, "fresh prompts each time"
    assert asked(found, 5.0, 10.0) == few
    assert asked(found, 5.0, 10.0, 1) != few


def test_without_times_it_has_no_rate(tmp_path: Path) -> None:
    assert trace(tmp_path, {"input_length": 5, "output_length": 1}).rate is None


async def test_it_is_sent_at_its_moments_whatever_becomes_of_those_before(tmp_path: Path) -> None:
    """To a server of words of two tokens that never ends an answer of 9 tokens. Cancelled, its requests are too."""
    found = trace(
        tmp_path,
        mooncake(0, 100, [], 9),
        mooncake(500, 80, []),
        mooncake(1000, 60, []),
        mooncake(1500, 40, []),
    )

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        tokens = 2 * len(asked.body["prompt"].split())
        usage = {"prompt_tokens": tokens, "completion_tokens": asked.body["max_tokens"]}
        writer.write(STREAM + event({"choices": [{"index": 0, "text": "word"}]}))
        if asked.body["max_tokens"] == 9:
            await asyncio.sleep(30)
        writer.write(event({"choices": [], "usage": usage}) + DONE)

    run = LoadRun()
    async with tiny_server(respond) as server:
        bodies = [made for _, made in found._from(10.0, 60.0, 1)]
        workload = OpenLoop(zip(DUES, bodies, strict=False), 1.0, 60.0)
        work = asyncio.create_task(workload.run(Endpoint(server.url, "m"), run))
        await until(lambda: len(run.exchanges) == 4 and len(run.of(Outcome.FINISHED)) == 3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert len(run.exchanges) == 4
    (endless,) = run.of(Outcome.UNFINISHED)
    assert endless.body["max_tokens"] == 9
    assert sorted(each.prompt_tokens for each in run.of(Outcome.FINISHED)) == [40, 60, 80]
    times = [each.started - run.began for each in run.exchanges]
    assert all(time >= due - 0.01 for time, due in zip(times, DUES, strict=True))
    assert run.asks_until == run.began + 1.0
    assert run.began < run.ended <= time.monotonic()
