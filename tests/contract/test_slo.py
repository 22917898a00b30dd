"""Durations and SLOs (`pdserve/contract/slo.py`)."""

import pytest

from pdserve.contract.live_settings import parse_slo, slo_settings
from pdserve.contract.slo import NO_SLO, SloTargets, format_duration, parse_duration, tightest_slo
from pdserve.util.errors import BadRequest

CHAT = SloTargets(0.5, 0.06)


@pytest.mark.parametrize(
    ("text", "value", "again"),
    [("500ms", 0.5, "500ms"), ("1.5 s", 1.5, "1.5s"), ("1500ms", 1.5, "1.5s"), ("1.25ms", 0.00125, "1.25ms")],
)
def test_a_written_duration_is_read_as_the_same_value(text: str, value: float, again: str) -> None:
    assert parse_duration(text) == pytest.approx(value)
    assert format_duration(parse_duration(text)) == again
    assert parse_duration(again) == parse_duration(text)


def test_invalid_durations_are_refused() -> None:
    for text in ("", "5", "ms", "0.0ms", "0.99ms", "1e3s", "-1s", "1s\n", "4000s", "1h", "\u0665s"):
        with pytest.raises(ValueError, match="not a duration with its unit"):
            parse_duration(text)


def test_an_slo_survives_conversion_to_settings() -> None:
    for slo in (CHAT, NO_SLO, SloTargets(gap=0.1), SloTargets(ttft=2.0)):
        assert parse_slo(slo_settings(slo)) == slo
    assert parse_slo({"slo-ttft": "soon", "policy": "adaptive"}) == NO_SLO


def test_the_tightest_slo_of_several_files_counts() -> None:
    assert tightest_slo([SloTargets(0.5, None), SloTargets(2.0, 0.1), NO_SLO]) == SloTargets(0.5, 0.1)
    assert tightest_slo([]) == NO_SLO


@pytest.mark.parametrize(
    ("slo", "headers", "expected"),
    [
        (CHAT, {}, CHAT),
        (CHAT, {"x-slo-ttft-ms": "2000", "x-slo-tpot-ms": "100.5"}, SloTargets(2.0, 0.1005)),
        (CHAT, {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "0.1"}, CHAT),
        (SloTargets(gap=0.06), {"x-slo-ttft-ms": "2000"}, SloTargets(gap=0.06)),
        (NO_SLO, {"x-slo-ttft-ms": "soon", "x-slo-tpot-ms": "-1"}, NO_SLO),
    ],
    ids=["no headers", "looser", "tighter", "for an unset target", "invalid, without an SLO"],
)
def test_headers_relax_an_slo_and_never_tighten_it(
    slo: SloTargets, headers: dict[str, str], expected: SloTargets
) -> None:
    assert slo.relaxed(headers) == expected


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("text", ["soon", "", "0", "-5", "nan", "inf", "3600001", "500ms"])
def test_an_invalid_header_is_named_in_the_error(name: str, text: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} must be a number of milliseconds above 0") as caught:
        CHAT.relaxed({name: text})
    assert caught.value.param == name
