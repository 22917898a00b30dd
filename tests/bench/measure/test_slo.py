"""SLOs: where their bounds come from, which requests keep them, and the tally of requests."""

from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.measure.slo import Slo, Tally, read_slo

SLO = Slo(0.5, 0.06)


def test_missing_bounds_come_from_the_files_slo(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("Frontend: {}\nVllmWorker: {model: demo}\nSlo: {ttft: 2s, gap: 40ms}\n")
    assert read_slo(None, None, file) == Slo(2.0, 0.04)
    assert read_slo("1s", None, file) == Slo(1.0, 0.04)
    file.write_text("Frontend: {}\nVllmWorker: {model: demo}\nSlo: {ttft: 2s}\n")
    assert read_slo(None, None, file) == Slo(2.0, 0.06)
    assert read_slo(None, None) == Slo(0.5, 0.06)


def _exchange(*arrivals: float, **what: Any) -> Exchange:
    """Return an exchange that started at 100 s. `arrivals`: seconds after its start."""
    return Exchange(
        started=100.0,
        arrivals=[100.0 + moment for moment in arrivals],
        ended=what.pop("ended", 100.0 + (arrivals or (0.0,))[-1]),
        **what,
    )


@pytest.mark.parametrize(
    ("exchange", "fate"),
    [
        (_exchange(0.1, 0.15, 0.2), "kept"),
        (_exchange(0.5, 0.55), "kept"),
        (_exchange(0.51, 0.55), "ttft"),
        (_exchange(0.1, 0.17), "gap"),
        (_exchange(0.6, 0.7), "both"),
        (_exchange(0.1, error="HTTP 503"), "failed"),
        (_exchange(ended=100.1), "ttft"),  # finished without any token
        (_exchange(ended=0.0), "ttft"),  # no token yet, two seconds after it began
        (_exchange(0.1, 1.99, ended=0.0), "gap"),
        (_exchange(0.1, 0.15, ended=0.0), "gap"),  # it has waited nearly two seconds for the next token
        (_exchange(*(0.1 + 0.05 * n for n in range(38)), ended=0.0), "unfinished"),
    ],
)
def test_each_request_is_tallied_once(exchange: Exchange, fate: str) -> None:
    tally = Tally.of(SLO, [exchange], now=102.0)
    assert tally == Tally(**{fate: 1})
    assert tally.missed == (fate not in ("kept", "unfinished"))
    assert SLO.kept(exchange) == (fate == "kept")
