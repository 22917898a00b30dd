"""What is written of a comparison carries its doubt."""

from itertools import cycle
from pathlib import Path

import pytest
import yaml
from pdserve_bench.compare.command import _single
from pdserve_bench.compare.comparison import Comparison
from pdserve_bench.compare.measuring import CompareOptions, Entrant
from pdserve_bench.compare.shown import report_of, winning_file
from pdserve_bench.simulated import simulated, write
from pdserve_bench.slo import Slo

from tests.bench.test_compare_measuring import probe, unknown


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Separation carries twice as much, by 40 requests at each rate."""
    file = write(simulated(), tmp_path / "graph.yaml")
    found = Comparison.prepare(CompareOptions(file, Slo()), _single(100, 8, 1))
    for candidate, carried in (
        (found.maker.aggregated()[0], 2.0),
        (found.maker.disaggregated()[0], 4.0),
    ):
        entrant = Entrant(candidate, unknown())
        for rate in (carried, carried, 1.1 * carried, 1.1 * carried):
            probe(entrant, rate, 20 if rate == carried else 2)
        found.entrants.append(entrant)
    found.noise = 0.02
    beside(found, 0.01, None, 0.05)
    return found


def beside(comparison: Comparison, *shares: float | None) -> None:
    """While it was probed other programs took these shares of the machine, in turn."""
    probes = [each for entrant in comparison.entrants for each in entrant.probes]
    for made, share in zip(probes, cycle(shares), strict=False):
        made.foreign = share


def written(comparison: Comparison) -> str:
    answer = comparison.recommendation()
    winner = comparison.candidate(answer)
    assert winner is not None
    text = winning_file(comparison, winner, answer)
    assert "PrefillWorker" in yaml.safe_load(text)
    return text


def test_an_answer_without_doubt(comparison: Comparison) -> None:
    report = report_of(comparison, complete=True)
    assert report.verdict.startswith("Disaggregate: ")
    assert report.data["doubts"] == []
    assert "Other programs took 3% of this machine's CPU during the probes." in report.notes
    assert "# Disaggregate: " in written(comparison)


def test_an_answer_in_doubt_says_so_wherever_it_is_written(comparison: Comparison) -> None:
    comparison.noise = None
    beside(comparison, 0.4, 0.6)
    report = report_of(comparison, complete=True)
    assert report.verdict.startswith("In doubt: disaggregate: ")
    for text in (report.lead, report.as_json(), written(comparison)):
        assert "Other programs took 50% of this machine's CPU meanwhile" in text
        assert "The noise of this machine is not known" in text
    assert "# In doubt: disaggregate: " in written(comparison)


def test_too_few_requests_are_no_answer_and_no_file(comparison: Comparison) -> None:
    for entrant in comparison.entrants:
        del entrant.found.probes[1]
    beside(comparison, 0.5)
    report = report_of(comparison, complete=True)
    assert report.verdict == "No recommendation."
    assert report.lead.startswith("Other programs took 50%")
    assert "20 requests at 2 requests/s" in report.lead
    assert comparison.candidate(comparison.recommendation()) is None
