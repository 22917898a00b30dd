"""What `pdserve trace` shows of a request."""

import re

import pytest
from msgspec.structs import replace

from pdserve.cli.trace import matching, not_found, requests, timeline, trace
from pdserve.command import command
from pdserve.watch import HOPS
from tests.graph_states import FELL, SLOW, instance, lines_of


def test_the_help_has_each_part_of_a_way() -> None:
    assert re.findall(r"^      ([a-z-]+) {2,}", trace.__doc__ or "", re.MULTILINE) == list(HOPS)


@pytest.mark.parametrize("width", [80, 140])
def test_a_timeline(width: int) -> None:
    lines = lines_of(timeline(SLOW), width)
    facts = "\n".join(lines)
    assert "request  ecba9d010be2479097e4823fc043fbec" in facts
    assert "/v1/chat/completions of demo, by alice, at frontend-0-aa" in facts
    assert "answer   200 in 2.0 s, 60 s ago: 24 tokens, the first after 1.2 s" in facts
    assert "prompt   412 tokens, 32 of them cached" in facts
    assert "prefill  remote: threshold" in facts
    assert "decode   decode-1-dd, then decode-0-cc" in facts
    assert "retries  1" in facts
    axis = next(index for index, line in enumerate(lines) if re.fullmatch(r" +0 +2.0 s", line))
    zero, end = lines[axis].index("0"), len(lines[axis])
    rows = {line.split()[0]: line for line in lines[axis + 1 :] if line[0] != " "}
    assert list(rows) == ["admission", "queue", "prefill", "transfer", "first-step", "decode", "migration"]
    place = {
        name: (row.index(re.findall("[█▏◆]", row)[0]) - zero) / (end - zero) for name, row in rows.items()
    }
    starts = {
        "admission": 0,
        "queue": 0.1,
        "prefill": 0.25,
        "transfer": 0.5,
        "first-step": 0.55,
        "migration": 0.75,
    }
    assert {name: place[name] for name in starts} == pytest.approx(starts, abs=0.03)
    assert rows["prefill"].count("█") == pytest.approx((end - zero) / 4, abs=1)
    assert re.search(r"▏ +4.0 ms +decode-1-dd", rows["first-step"])
    assert re.search(r"◆ +at 1.5 s +decode-1-dd", rows["migration"])
    assert lines[lines.index(rows["migration"]) + 1].split() == ["decode-1-dd", "is", "gone"]


def test_a_timeline_says_that_a_request_runs_or_failed() -> None:
    running = "\n".join(lines_of(timeline(FELL), 80))
    assert "running  for 5.0 s so far: 0 tokens" in running
    assert "no prefill worker took it within 2.5 s" in running
    failed = replace(SLOW, status=503, error="no decode worker is there", hops=[], trace_id="4bf92f")
    shown = "\n".join(lines_of(timeline(failed), 80))
    assert "answer   503" in shown
    assert "error    no decode worker is there" in shown
    assert "trace    4bf92f" in shown


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ecba9d010be2", [SLOW]),
        ("chatcmpl-ecba9d010be2479097e4823fc043fbec", [SLOW]),
        ("ecb", []),
        ("cba9d010be24", []),
        ("", []),
    ],
)
def test_an_id_is_found_by_its_beginning_and_inside_a_longer_one(wanted: str, found: list[object]) -> None:
    assert matching([SLOW, FELL, replace(SLOW, request_id="e")], wanted) == found


def test_what_is_not_found_names_the_frontends_that_were_asked() -> None:
    one, two = instance("frontend-0-aa", 1), instance("frontend-1-bb", 2)
    said = not_found("ecba9d010be2479097e4823fc0430000", [one, two], [one.id], [SLOW])
    assert "Asked: frontend-0-aa, frontend-1-bb; silent: frontend-1-bb." in said
    assert "for 15 minutes" in said
    assert f"did you mean {SLOW.request_id}?" in said
    assert f"`{command('trace')}` lists the last." in not_found("x", [one], [one.id], [])
    assert "no frontend runs" in not_found("x", [], [], [])


@pytest.mark.parametrize("width", [140, 200])
def test_the_last_requests_are_a_line_each(width: int) -> None:
    shown = "\n".join(lines_of(requests([FELL, SLOW]), width))
    assert re.search(r"b0{31} +running +5.0 s ago", shown), shown
    assert re.search(r"ecba\w{28} +200 +62 s ago +2.0 s +1.2 s +412 +32 +24 +alice +remote: ", shown), shown
    if width == 200:
        assert "threshold  prefill-1 → decode-1 → decode-0" in shown
    assert re.search(r"^ecba9d01 +200 +62 s ago", "\n".join(lines_of(requests([SLOW], 8), 80)), re.M)
