"""The written result of a comparison includes its doubts."""

from pathlib import Path

import pytest
import yaml
from pdserve_bench.compare.command import _single
from pdserve_bench.compare.comparison import Comparison
from pdserve_bench.compare.measuring import CompareOptions, Entrant
from pdserve_bench.compare.outcome import report_of, winning_file
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.measure.slo import Slo

from tests.bench.compare.test_measuring import probe, unknown


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """A comparison in which disaggregation carries twice the rate, with 40 requests per rate, while other programs used
    half of the CPU."""
    file = write(simulated(), tmp_path / "graph.yaml")
    found = Comparison.prepare(CompareOptions(file, Slo()), _single(100, 8, 1))
    both = found.maker.aggregated()[0], found.maker.disaggregated()[0]
    for candidate, carried in zip(both, (2.0, 4.0), strict=True):
        entrant = Entrant(candidate, unknown())
        for rate in (carried, carried, 1.1 * carried, 1.1 * carried):
            probe(entrant, rate, 20 if rate == carried else 2)
            entrant.probes[-1].foreign = 0.5
        found.entrants.append(entrant)
    return found


def test_a_doubtful_result_says_so_everywhere(comparison: Comparison) -> None:
    report, answer = report_of(comparison, complete=True), comparison.recommendation()
    assert report.verdict.startswith("In doubt: disaggregate: ")
    assert "Other programs took 50% of this machine's CPU during the probes." in report.notes
    winner = comparison.candidate(answer)
    assert winner is not None
    file = winning_file(comparison, winner, answer)
    assert "# In doubt: disaggregate: " in file
    assert "PrefillWorker" in yaml.safe_load(file)
    for text in (report.lead, report.as_json(), file):
        assert "Other programs took 50% of this machine's CPU meanwhile" in text
        assert "The noise of this machine is unknown" in text


def test_too_few_requests_give_no_result_and_no_file(comparison: Comparison) -> None:
    for entrant in comparison.entrants:
        del entrant.found.probes[1]
    report = report_of(comparison, complete=True)
    assert report.verdict == "No recommendation."
    assert report.lead.startswith("The noise of this machine is unknown")
    assert "20 requests at 2 requests/s" in report.lead
    assert comparison.candidate(comparison.recommendation()) is None


def test_a_load_generator_that_was_late_is_noted(comparison: Comparison) -> None:
    late = "The load generator itself was late by up to 40 ms (at 2 req/s)"
    assert late not in " ".join(report_of(comparison, complete=True).notes)
    comparison.entrants[0].probes[0].stall = 0.04
    assert late in " ".join(report_of(comparison, complete=True).notes)
