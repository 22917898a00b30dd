"""What `pdserve status --watch` shows of a graph."""

import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.cli.find import GraphAddress
from pdserve.cli.live import _Screen
from pdserve.cli.status import as_dict, lasting, render
from pdserve.cli.top import screen, share, spark
from pdserve.observe.graph_state import GraphState, graph_state
from pdserve.observe.problems import duration
from pdserve.watch import MAX_TICKS, LinkState
from tests.graph_states import FELL, NOW, lines_of, loaded


def watched(state: GraphState, width: int = 80, height: int = 24) -> list[str]:
    return lines_of(screen(state, "http://127.0.0.1:8000", width, height, NOW), width)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 10), (20, 3), (250, 90)])
@pytest.mark.parametrize("workers", [2, 60])
def test_the_screen_fits(width: int, height: int, workers: int) -> None:
    lines = watched(loaded(True, True, True, workers), width, height)
    assert len(lines) <= max(height, 8)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({}, "all is well"),
        ({"down": True}, r"✗ decode-1 is down: killed by SIGKILL"),
        ({"down": True}, r"decode-1 +waiting to restart +3.0 s +killed"),
        ({"full": True}, r"✗ the prefill queue is full: 10 of 10"),
        ({"full": True}, r"prefill queue █+ 10 of 10"),
        ({"slow": True}, r"✗ KV from prefill-1 to decode-0 is 400 times slower"),
        ({"slow": True}, r"decode-0 ← prefill-1 +1 +1.5 s +2 MB/s +2: the read"),
    ],
)
def test_what_is_wrong_is_on_the_smallest_screen(what: dict[str, Any], said: str) -> None:
    state = replace(loaded(**what), receipts=[])
    assert re.search(said, "\n".join(watched(state))), "\n".join(watched(state))


def test_the_parts_of_the_screen() -> None:
    shown = "\n".join(watched(loaded(), 160, 50))
    for said in (
        r"TTFT p50 +▂█[▂█]+ +350 ms +p95 +▂█[▂█]+ +2.3 s",
        r"requests/s +█+ +3.0 +tokens/s +█+ +120",
        r"decode-0 +ready +12 min +2 +1 +██░+ +10%  demo",
        r"frontend-0 → decode-0 +2 +0.3 ms",
        r"decode-0 ← prefill-0 +1 +20 ms +800 MB/s +40",
        r"fallback +1 +2.5 s ago +decode-0 +no prefill worker took it within 2.5 s +b0{31}",
        r"migration +1 +60 s ago +decode-1 +decode-1-dd is gone",
        r"b0{31} +5.0 s ago +running",
        r"ecba\w+ +62 s ago +200 +2.0 s +1.2 s +412 +32 +24 +alice +remote: threshold +prefill-1 → decode-1 → decode-0",
        r"q ends · demo \(2 decode workers\) · router = kv",
    ):
        assert re.search(said, shown), said


def test_the_broken_and_the_busiest_come_first_where_not_all_fit() -> None:
    lines = watched(loaded(down=True, slow=True, workers=60))
    first = next(index for index, line in enumerate(lines) if line.startswith("process"))
    assert lines[first + 1].startswith("decode-1 ")
    assert [line.split()[3] for line in lines[first + 2 : first + 4]] == ["min", "min"]
    assert [line.split()[4] for line in lines[first + 2 : first + 4]] == ["8", "8"]
    left_out = [int(line.split()[1]) for line in lines if re.match(r"and \d+ more", line)]
    assert sum(left_out) > 200
    links = next(index for index, line in enumerate(lines) if line.startswith("link"))
    assert "← prefill-1" in lines[links + 1]


def test_a_link_that_is_down_says_why() -> None:
    state = loaded()
    link = LinkState("decode-0-cc", "requests", up=False, failure="handshake refused")
    state = replace(state, instances=[replace(state.instances[0], links=[link]), *state.instances[1:]])
    assert re.search(r"frontend-0 → decode-0 +0 +down: handshake refused", "\n".join(watched(state, 100)))


def test_detours_that_are_alike_are_one() -> None:
    state = loaded()
    state = replace(state, receipts=[*state.receipts, replace(FELL, request_id="other", age=9.0)])
    assert re.search(
        r"fallback +2 +2.5 s ago +decode-0 +no prefill .*b0000000$", "\n".join(watched(state, 100)), re.M
    )


def test_an_empty_graph() -> None:
    assert any("all is well" in line for line in watched(graph_state([], [], {}, {}, {})))


@pytest.mark.parametrize(
    ("room", "wanted", "given"),
    [
        (20, [3, 4, 5], [3, 4, 5]),
        (9, [10, 10, 10], [5, 2, 2]),
        (9, [2, 10, 10], [2, 4, 3]),
        (3, [10, 10, 10], [2, 1, 0]),
        (0, [1], [0]),
        (-3, [1, 1], [0, 0]),
        (5, [], []),
    ],
)
def test_share(room: int, wanted: list[int], given: list[int]) -> None:
    assert share(room, wanted) == given


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, "     "),
        ([0.0, 0.0], MAX_TICKS, "▁▁".rjust(MAX_TICKS)),
        ([1.0, None, 7.0], MAX_TICKS, "▂ █".rjust(MAX_TICKS)),
        ([float(number) for number in range(1, MAX_TICKS + 1)], 5, "▇▇▇▇█"),
        ([8.0] + [1.0] * 4, MAX_TICKS // 2, "█▁▁".rjust(MAX_TICKS // 2)),
        ([1.0], 0, ""),
    ],
)
def test_spark(values: Sequence[float | None], width: int, drawn: str) -> None:
    assert spark(values, width) == drawn


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0.0, "0.0 ms"), (0.00034, "0.3 ms"), (0.0421, "42 ms"), (0.9999, "1000 ms"), (1.25, "1.2 s")),
        *((59.6, "60 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h")),
    ],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_what_time_alone_changes_is_no_change() -> None:
    def told(state: GraphState) -> Any:
        return lasting(as_dict(state, GraphAddress("etcd", "pdserve")))

    before, later = loaded(), loaded()
    aged = [replace(each, age=each.age + 1, seconds=each.seconds + each.running) for each in later.receipts]
    moments = [replace(moment, age=moment.age + 2) for moment in later.moments[1:]]
    assert told(replace(later, receipts=aged, moments=moments)) == told(before)
    assert told(replace(later, queue_depth=7)) != told(before)
    assert told(replace(later, receipts=[replace(aged[0], output_tokens=99), *aged[1:]])) != told(before)
    assert told(loaded(slow=True)) != told(before)


def test_a_terminal_without_a_size_is_taken_for_80_by_25(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    shown = _Screen(GraphAddress("etcd", "pdserve"))
    with shown.console.screen():
        shown.show(loaded(down=True))
    assert "decode-1 is down" in capsys.readouterr().out


def test_plain_status_says_on_which_host_a_process_is_down() -> None:
    lines = lines_of(render(loaded(down=True), GraphAddress("etcd", "pdserve")), 200)
    (row,) = [line for line in lines if line.lstrip().startswith("decode-1 ")]
    assert "waiting to restart" in row
    assert row.endswith("127.0.0.1")


def test_the_json_has_all_of_it() -> None:
    found = as_dict(loaded(), GraphAddress("127.0.0.1:2379", "pdserve", "http://127.0.0.1:8000"))
    keys = "etcd namespace url queue_depth queue_limit instances models slots settings moments receipts outages gone"
    assert set(found) == set(keys.split())
    assert found["instances"][0]["load"]["running"] == 4
    assert found["instances"][0]["links"][0]["to"] == "decode-0-cc"
    assert [card["instance"] for card in found["models"]["demo"]] == ["decode-0-cc", "decode-1-dd"]
    assert found["receipts"][0]["hops"][1]["name"] == "fallback"
