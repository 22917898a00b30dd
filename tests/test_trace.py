"""What `pdserve trace` shows of a request."""

import re

from msgspec.structs import replace

from pdserve.cli.trace import matching, not_found, requests, way
from pdserve.command import command
from tests.graph_states import FELL, SLOW, lines_of


def test_the_way_of_a_request_is_its_receipt_and_a_line_for_each_hop() -> None:
    failed = replace(SLOW, status=503, error="no decode worker is there")
    lines = lines_of(way(failed), 80)
    facts = {line[:15].strip(): line[15:] for line in lines[: lines.index("")]}
    assert facts["request id"] == "ecba9d010be2479097e4823fc043fbec"
    assert (facts["age"], facts["seconds"], facts["ttft"]) == ("62 s", "2.0 s", "1.2 s")
    assert (facts["status"], facts["error"]) == ("503", "no decode worker is there")
    assert facts["instances"] == "decode-1-dd, decode-0-cc"
    assert facts.keys().isdisjoint({"running", "trace id", "hops"}), "what says nothing is left out"
    rows = [line.split() for line in lines]
    assert ["first-step", "1.1", "s", "4.0", "ms", "decode-1-dd"] in rows
    assert ["migration", "1.5", "s", "decode-1-dd", "decode-1-dd", "is", "gone"] in rows
    assert "running        True" in "\n".join(lines_of(way(FELL), 80))


def test_an_id_is_found_by_its_beginning_and_inside_a_longer_one() -> None:
    for wanted in ("ecba9d010be2", "chatcmpl-ecba9d010be2479097e4823fc043fbec"):
        assert matching([SLOW, FELL, replace(SLOW, request_id="e")], wanted) == [SLOW]
    for none in ("ecb", "cba9d010be24", ""):
        assert matching([SLOW, FELL], none) == []


def test_what_is_not_found_is_said_with_the_nearest_id() -> None:
    said = not_found("ecba9d010be2479097e4823fc0430000", [SLOW])
    assert "for 15 minutes" in said
    assert f"did you mean {SLOW.request_id}?" in said
    assert f"`{command('trace')}` lists the last." in not_found("x", [])


def test_the_last_requests_are_a_line_each() -> None:
    shown = "\n".join(lines_of(requests([FELL, SLOW]), 200))
    assert re.search(r"b0{31} +running +5.0 s ago", shown), shown
    assert re.search(r"ecba\w{28} +200 +62 s ago +2.0 s +1.2 s +412 +32 +24 +alice +remote: ", shown), shown
    assert "threshold  prefill-1 → decode-1 → decode-0" in shown
    assert re.search(r"^ecba9d01 +200 +62 s ago", "\n".join(lines_of(requests([SLOW], 8), 80)), re.M)
