"""What `pdserve status` shows of a graph."""

import re

import pytest

from pdserve.cli.find import GraphAddress
from pdserve.cli.status import as_dict, render
from pdserve.observe.problems import duration
from tests.graph_states import lines_of, loaded

GRAPH = GraphAddress("127.0.0.1:2379", "pdserve", "http://127.0.0.1:8000")


def test_problems_stand_above_the_processes() -> None:
    for what, first in (
        (loaded(workers=60), r"! 1 remote prefill of the last 30 s came to nothing"),
        (loaded(down=True, workers=60), r"✗ decode-1 is down: killed by SIGKILL"),
    ):
        lines = [line for line in lines_of(render(what, GRAPH), 80) if line.strip()]
        assert re.search(first, lines[0])


def test_the_parts_of_the_table_and_of_the_summary() -> None:
    (row,) = (
        each
        for each in lines_of(render(loaded(down=True), GRAPH), 200)
        if each.lstrip().startswith("decode-1 ")
    )
    assert re.search(r"waiting to restart \d.* 127\.0\.0\.1$", row)
    shown = "\n".join(lines_of(render(loaded(), GRAPH), 200))
    for line in (
        r"decode-0-cc +ready .* +demo +127\.0\.0\.1:10 +CPU +2 +1 +10% +65,536 +tcp://127\.0\.0\.1:10",
        r"model +demo, 2 decode workers, /models/demo",
        r"queue +1 prefill requests waiting",
        r"backlog +prefill 0\.0 s; decode 0\.0 s",
        r"set +router = kv",
        r"URL +http://127\.0\.0\.1:8000/v1",
    ):
        assert re.search(line, shown), shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00034, "0.3 ms"), (0.0421, "42 ms"), (1.25, "1.2 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h")],
)
def test_a_duration_has_the_unit_that_leaves_two_or_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_json_has_all_of_it() -> None:
    found = as_dict(loaded(), GRAPH)
    keys = "etcd namespace url queue_depth queue_limit instances models slots settings moments receipts outages gone"
    assert set(found) == set(keys.split())
    assert found["instances"][0]["load"]["running"] == 4
    assert found["instances"][0]["links"][0]["to"] == "decode-0-cc"
    assert [card["instance"] for card in found["models"]["demo"]] == ["decode-0-cc", "decode-1-dd"]
    assert found["receipts"][0]["hops"][1]["name"] == "fallback"
