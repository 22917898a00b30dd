"""Traces are read strictly and replayed with their lengths and shared prefixes."""

import json
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.runs import OpenLoop
from pdserve_bench.measure.trace import BLOCK, Trace, read_trace

from pdserve.util.errors import ConfigError

ENDPOINT = Endpoint("http://127.0.0.1:1", "m")
WORD = 2.0
"""Tokens per word in these tests."""


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
    """Return each request's arrival time and the arguments of its body: tokens per word, salt, `own`."""
    workload = found.at(rate, seconds, seed)
    assert isinstance(workload, OpenLoop)
    return [(due, *made.keywords.values()) for due, made in workload.requests]  # type: ignore[attr-defined]


def test_prefixes_are_shared_as_the_hash_ids_say(tmp_path: Path) -> None:
    lines = [(1300, [0, 1, 2]), (1500, [0, 1, 3]), (600, [9, 8]), (600, []), (600, [])]
    found = trace(tmp_path, *(mooncake(0, tokens, blocks) for tokens, blocks in lines))
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
    lines = [(0, 5000, 8), (1000, 100, 0), (2000, 100, 8), (3000, 90, 8)]
    found = trace(tmp_path, *(mooncake(at, tokens, [], answer) for at, tokens, answer in lines)).within(4096)
    assert [request.input_length for request in found.requests] == [100, 90]
    assert found.rate == pytest.approx(1.0)
    assert "; 2 left out: without an answer, or too long" in found.describe()
    with pytest.raises(ConfigError, match="all its requests are longer"):
        found.within(64)
    assert trace(tmp_path, {"input_length": 5, "output_length": 1}).rate is None


def test_requests_come_in_the_order_of_the_trace_which_repeats(tmp_path: Path) -> None:
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
