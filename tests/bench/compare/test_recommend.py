"""The recommendation follows from the findings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pdserve_bench.compare.recommend import CandidateResult, Criteria, Verdict, recommend
from pdserve_bench.measure.slo import Tally

GAPS = Tally(kept=20, gap=10)
LATE = Tally(kept=20, ttft=10)


def _result(name: str, low: float | None, high: float | None, broke: Tally, **more: Any) -> CandidateResult:
    middle = low if low is None or high is None else (low + high) / 2
    return CandidateResult(name, name[0] == "a", low, high, middle, broke, **more)


def together(
    low: float | None = 3.0, high: float | None = 3.3, broke: Tally = GAPS, **more: Any
) -> CandidateResult:
    return _result("aggregated: 1 engine x 2 threads, batch 512", low, high, broke, **more)


def separate(
    low: float | None = 9.0, high: float | None = 9.9, broke: Tally = LATE, **more: Any
) -> CandidateResult:
    return _result("1 prefill + 1 decode", low, high, broke, **more)


DISAGGREGATE, DONT, SAME, UNKNOWN = Verdict
FEW = together(None, 3.0, Tally(kept=2, gap=13))
"""An aggregated candidate that surely does not carry 3 requests/s."""
CASES = {
    "the intervals overlap": (SAME, Criteria(), [together(3.0, 3.4), separate(3.3, 3.6)]),
    "disjoint intervals, within the noise": (SAME, Criteria(noise=0.2), [together(), separate(3.5, 3.8)]),
    "disjoint intervals, above the noise": (
        DISAGGREGATE,
        Criteria(noise=0.1),
        [together(), separate(3.5, 3.8)],
    ),
    "the graph is worse, within the noise": (
        SAME,
        Criteria(noise=0.2),
        [together(3.5, 3.8), separate(3.0, 3.3)],
    ),
    "the engine has just enough headroom": (DONT, Criteria(rate=2.0), [together(2.5, 2.7), separate()]),
    "the engine has too little headroom": (DISAGGREGATE, Criteria(rate=2.9), [together(), separate()]),
    "neither carries any rate": (DONT, Criteria(), [together(None, 0.5), separate(None, 0.5)]),
    "the engine surely does not carry 3/s": (DISAGGREGATE, Criteria(), [FEW, separate(3.0, None)]),
    "the engine nearly carries 3/s": (
        SAME,
        Criteria(),
        [replace(FEW, broke=Tally(kept=13, gap=2)), separate(3.0, None)],
    ),
    "both carry the highest rate": (SAME, Criteria(), [together(40.0, None), separate(40.0, None)]),
    "the faster graph failed requests": (DONT, Criteria(), [together(), separate(failed=2)]),
    "the engine failed requests": (UNKNOWN, Criteria(), [together(failed=2), separate()]),
    "the better of two graphs failed requests": (
        DISAGGREGATE,
        Criteria(),
        [together(), separate(failed=2), separate(4.0, 4.4)],
    ),
    "the graph did not start": (UNKNOWN, Criteria(), [together(), separate(None, None, problem="no memory")]),
    "nothing was measured": (UNKNOWN, Criteria(), []),
    "the better of two graphs counts": (
        DISAGGREGATE,
        Criteria(),
        [together(), separate(2.0, 2.2), separate()],
    ),
    "the better of two engines counts": (
        SAME,
        Criteria(),
        [together(1.0, 1.1), together(8.8, 9.5), separate()],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    verdict, criteria, findings = CASES[case]
    assert recommend(findings, criteria).verdict is verdict


QUIET = Criteria(noise=0.02, foreign=0.0)


def test_too_few_requests_give_no_recommendation() -> None:
    few = "8 requests at 3 requests/s"
    for findings in ([together(thin=few), separate()], [together(), separate(thin=few)]):
        found = recommend(findings, QUIET)
        assert (found.verdict, found.choice, found.headline) == (UNKNOWN, None, "No recommendation.")
        assert f"by {few}. Give --minutes more." in found.reason
    asked = recommend([together(), separate(thin=few)], Criteria(rate=1.0))
    assert asked.verdict is DONT, "the baseline alone carries the rate"


def test_an_answer_comes_with_its_doubts() -> None:
    """The other doubts are in test_outcome.py."""
    found = recommend([together(), separate()], Criteria(noise=0.0, foreign=None))
    assert found.headline == "in doubt: disaggregate: 1 prefill + 1 decode."
    assert found.doubts == ("The CPU share of other programs is unknown.",)
    assert not recommend([together(), separate()], QUIET).doubts


@pytest.mark.parametrize(
    ("findings", "rate", "said"),
    [
        ([together(), separate()], None, "1 prefill + 1 decode carries 9.45 (9 to 9.9) requests/s"),
        ([together(), separate()], None, "3.15 (3 to 3.3): 3 times as much"),
        ([together(), separate()], None, "breaks first on gaps: prompts that are computed delay"),
        ([together(), separate()], None, "prefill side, which is the bottleneck"),
        ([together(), separate(2.0, 2.2, GAPS)], None, "decode side is the bottleneck"),
        # a loser with a wide interval may be nearly as good as its upper bound
        ([together(2.5, 5.0), separate()], None, "(2.5 to 5): at least 1.8 times as much"),
        ([together(), separate(1.0, 1.1)], None, "don't disaggregate: run 1 engine x 2 threads, batch 512."),
        ([together(), separate(3.0, 3.3)], None, "don't disaggregate: no difference could be measured"),
        ([together(), separate(1.0, 1.1)], None, "1 prefill + 1 decode 1.05 (1 to 1.1): 3 times as much"),
        ([together(), separate()], 1.0, "Above that load separation would pay"),
        ([together(), separate()], 20.0, "needs more hardware"),
        ([together(), separate(failed=2), separate(4.0, 4.4)], None, "failed 2 requests"),
    ],
)
def test_an_answer_comes_with_its_numbers(
    findings: Sequence[CandidateResult], rate: float | None, said: str
) -> None:
    found = recommend(findings, Criteria(rate=rate, noise=0.02, foreign=0.0))
    assert said in " ".join((found.headline, found.reason, found.otherwise, *found.notes))
