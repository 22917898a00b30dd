"""The recommendation follows from the findings."""

from collections.abc import Sequence

import pytest
from pdserve_bench.compare.recommend import CandidateResult, Criteria, Verdict, recommend
from pdserve_bench.slo import Tally

GAPS = Tally(kept=20, gap=10)
LATE = Tally(kept=20, ttft=10)


def together(
    low: float | None = 3.0, high: float | None = 3.3, broke: Tally = GAPS, **more: object
) -> CandidateResult:
    middle = None if low is None else low if high is None else (low + high) / 2
    name = "aggregated: 1 engine x 2 threads, batch 512"
    return CandidateResult(name, True, low, high, middle, broke, split="1 engine", **more)  # type: ignore[arg-type]


def separate(
    low: float | None = 9.0, high: float | None = 9.9, broke: Tally = LATE, **more: object
) -> CandidateResult:
    middle = None if low is None else low if high is None else (low + high) / 2
    name = "1 prefill + 1 decode"
    return CandidateResult(name, False, low, high, middle, broke, **{"split": "1P+1D", **more})  # type: ignore[arg-type]


CASES = {
    "separation carries more": ([together(), separate()], Criteria(), Verdict.DISAGGREGATE),
    "separation carries less": ([together(), separate(2.0, 2.2)], Criteria(), Verdict.DONT),
    "loses within the noise": ([together(3.5, 3.8), separate(3.0, 3.3)], Criteria(noise=0.2), Verdict.SAME),
    "equal": ([together(), separate(3.0, 3.3)], Criteria(), Verdict.SAME),
    "the intervals touch": ([together(3.0, 3.4), separate(3.3, 3.6)], Criteria(), Verdict.SAME),
    "apart, but within the noise": ([together(), separate(3.5, 3.8)], Criteria(noise=0.2), Verdict.SAME),
    "apart, above the noise": ([together(), separate(3.5, 3.8)], Criteria(noise=0.1), Verdict.DISAGGREGATE),
    "the load is carried anyhow": ([together(), separate()], Criteria(rate=1.0), Verdict.DONT),
    "carried without headroom": ([together(), separate()], Criteria(rate=2.9), Verdict.DISAGGREGATE),
    "only separation carries the load": ([together(), separate()], Criteria(rate=6.0), Verdict.DISAGGREGATE),
    "nothing carries anything": ([together(None, 0.5), separate(None, 0.5)], Criteria(), Verdict.DONT),
    "aggregated surely does not carry what separation carries": (
        [together(None, 3.0, Tally(kept=2, gap=13)), separate(3.0, None)],
        Criteria(),
        Verdict.DISAGGREGATE,
    ),
    "aggregated nearly carries it": (
        [together(None, 3.0, Tally(kept=13, gap=2)), separate(3.0, None)],
        Criteria(),
        Verdict.SAME,
    ),
    "no rate was too high": ([together(40.0, None), separate(40.0, None)], Criteria(), Verdict.SAME),
    "the winner dropped requests": ([together(), separate(failed=2)], Criteria(), Verdict.DONT),
    "the baseline dropped requests": ([together(failed=2), separate()], Criteria(), Verdict.UNKNOWN),
    "the graph did not start": (
        [together(), separate(None, None, problem="no memory")],
        Criteria(),
        Verdict.UNKNOWN,
    ),
    "nothing was measured": ([], Criteria(), Verdict.UNKNOWN),
    "just enough headroom": ([together(2.5, 2.7), separate()], Criteria(rate=2.0), Verdict.DONT),
    "only the dropping graph would carry it": (
        [together(), separate(failed=1)],
        Criteria(rate=6.0),
        Verdict.DONT,
    ),
    "the better of two graphs wins": (
        [together(), separate(2.0, 2.2), separate()],
        Criteria(),
        Verdict.DISAGGREGATE,
    ),
    "the better aggregated candidate is the peer": (
        [together(1.0, 1.1), together(8.8, 9.5), separate()],
        Criteria(),
        Verdict.SAME,
    ),
    "the better graph dropped requests": (
        [together(), separate(failed=2), separate(4.0, 4.4)],
        Criteria(),
        Verdict.DISAGGREGATE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    findings, criteria, verdict = CASES[case]
    assert recommend(findings, criteria).verdict is verdict


QUIET = Criteria(noise=0.02, foreign=0.0)


def test_of_too_few_requests_nothing_is_recommended() -> None:
    few = "8 requests at 3 requests/s"
    for findings in ([together(thin=few), separate()], [together(), separate(thin=few)]):
        found = recommend(findings, QUIET)
        assert (found.verdict, found.choice, found.headline) == (
            Verdict.UNKNOWN,
            None,
            "No recommendation.",
        )
        assert f"by {few}. Give --minutes more." in found.reason
    asked = recommend([together(), separate(thin=few)], Criteria(rate=1.0))
    assert asked.verdict is Verdict.DONT, "it rests on the other one alone"


@pytest.mark.parametrize(
    ("criteria", "doubt"),
    [
        (Criteria(noise=None, foreign=0.0), "The noise of this machine is not known"),
        (Criteria(noise=0.0, foreign=None), "other programs took of this machine is not known"),
        (Criteria(noise=0.0, foreign=0.6), "Other programs took 60% of this machine's CPU meanwhile"),
    ],
)
def test_an_answer_comes_with_its_doubts(criteria: Criteria, doubt: str) -> None:
    found = recommend([together(), separate()], criteria)
    assert found.headline == "in doubt: disaggregate: 1 prefill + 1 decode."
    (text,) = found.doubts
    assert doubt in text
    assert not recommend([together(), separate()], QUIET).doubts


@pytest.mark.parametrize(
    ("findings", "rate", "said"),
    [
        ([together(), separate()], None, "1 prefill + 1 decode carries 9.45 (9 to 9.9) requests/s"),
        ([together(), separate()], None, "3.15 (3 to 3.3): 3 times as much"),
        ([together(), separate()], None, "breaks first on gaps: prompts that are computed stall"),
        ([together(), separate()], None, "prefill side, which is the bottleneck"),
        ([together(), separate(2.0, 2.2, GAPS)], None, "decode side is the bottleneck"),
        # a loser that was only screened may be nearly as good as its upper bound
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
