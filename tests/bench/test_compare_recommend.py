"""The recommendation follows from the findings."""

from collections.abc import Sequence

import pytest
from pdserve_bench.compare.recommend import CandidateResult, Criteria, Recommendation, Verdict, recommend
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
    "equal": ([together(), separate(3.0, 3.3)], Criteria(), Verdict.SAME),
    "the intervals touch": ([together(3.0, 3.4), separate(3.3, 3.6)], Criteria(), Verdict.SAME),
    "apart, but within the noise": ([together(), separate(3.5, 3.8)], Criteria(noise=0.2), Verdict.SAME),
    "apart, above the noise": ([together(), separate(3.5, 3.8)], Criteria(noise=0.1), Verdict.DISAGGREGATE),
    "loses within the noise": ([together(3.5, 3.8), separate(3.0, 3.3)], Criteria(noise=0.2), Verdict.SAME),
    "the load is carried anyhow": ([together(), separate()], Criteria(rate=1.0), Verdict.DONT),
    "carried without headroom": ([together(), separate()], Criteria(rate=2.9), Verdict.DISAGGREGATE),
    "only separation carries the load": ([together(), separate()], Criteria(rate=6.0), Verdict.DISAGGREGATE),
    "nothing carries anything": ([together(None, 0.5), separate(None, 0.5)], Criteria(), Verdict.DONT),
    "aggregated carries nothing": ([together(None, 0.5), separate()], Criteria(), Verdict.DISAGGREGATE),
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
    "too high for aggregated only": ([together(), separate(40.0, None)], Criteria(), Verdict.DISAGGREGATE),
    "the winner dropped requests": ([together(), separate(failed=2)], Criteria(), Verdict.DONT),
    "the baseline dropped requests": ([together(failed=2), separate()], Criteria(), Verdict.UNKNOWN),
    "the graph did not start": (
        [together(), separate(None, None, problem="no memory")],
        Criteria(),
        Verdict.UNKNOWN,
    ),
    "nothing was measured": ([], Criteria(), Verdict.UNKNOWN),
    "answers are the work, at the asked rate": (
        [together(9.0, None), separate(None, 9.0, Tally(kept=5, gap=22))],
        Criteria(rate=9.0),
        Verdict.DONT,
    ),
    "prompts stall the answers, at the asked rate": (
        [together(None, 2.5, Tally(kept=3, gap=30)), separate(2.5, None)],
        Criteria(rate=2.5),
        Verdict.DISAGGREGATE,
    ),
    "just enough headroom": ([together(2.5, 2.7), separate()], Criteria(rate=2.0), Verdict.DONT),
    "neither carries the asked rate": ([together(), separate()], Criteria(rate=50.0), Verdict.DISAGGREGATE),
    "both dropped requests": ([together(failed=2), separate(failed=1)], Criteria(), Verdict.UNKNOWN),
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
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    findings, criteria, verdict = CASES[case]
    assert recommend(findings, criteria).verdict is verdict


QUIET = Criteria(noise=0.02, foreign=0.0)


def answer(findings: Sequence[CandidateResult], criteria: Criteria | None = None) -> Recommendation:
    return recommend(findings, criteria or QUIET)


def test_of_too_few_requests_nothing_is_recommended() -> None:
    for findings in (
        [together(thin="8 requests at 3 requests/s"), separate()],
        [together(), separate(thin="8 requests at 3 requests/s")],
    ):
        found = answer(findings)
        assert (found.verdict, found.choice) == (Verdict.UNKNOWN, None)
        assert found.headline == "No recommendation."
        assert "Too few requests were judged for an answer: 1 " in found.reason
        assert "by 8 requests at 3 requests/s. Give --minutes more." in found.reason
    asked = answer(
        [together(), separate(thin="8 requests at 9 requests/s")], Criteria(rate=1.0, noise=0.0, foreign=0.0)
    )
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
    found = answer([together(), separate()], criteria)
    assert found.headline == "in doubt: disaggregate: 1 prefill + 1 decode."
    (text,) = found.doubts
    assert doubt in text
    assert not answer([together(), separate()], QUIET).doubts


def test_the_choice_comes_with_its_numbers() -> None:
    found = answer([together(), separate()])
    assert found.choice == separate()
    assert "1 prefill + 1 decode carries 9.45 (9 to 9.9) requests/s" in found.reason
    assert "3.15 (3 to 3.3): 3 times as much" in found.reason


def test_of_a_wide_interval_only_what_is_sure_is_claimed() -> None:
    """A loser that was only screened may be nearly as good as its upper bound."""
    assert "(2.5 to 5): at least 1.8 times as much" in answer([together(2.5, 5.0), separate()]).reason


def test_the_better_aggregated_candidate_is_the_peer() -> None:
    assert answer([together(1.0, 1.1), together(8.8, 9.5), separate()]).verdict is Verdict.SAME


def test_why_the_loser_lost() -> None:
    assert "breaks first on gaps: prompts that are computed stall" in answer([together(), separate()]).reason
    assert "prefill side, which is the bottleneck" in answer([together(), separate()]).reason
    decode_bound = answer([together(), separate(2.0, 2.2, GAPS)])
    assert "decode side is the bottleneck" in decode_bound.reason


def test_a_loss_of_separation_comes_with_its_numbers() -> None:
    found = answer([together(), separate(1.0, 1.1)])
    assert found.headline == "don't disaggregate: run 1 engine x 2 threads, batch 512."
    assert (
        "carries 3.15 (3 to 3.3) requests/s, 1 prefill + 1 decode 1.05 (1 to 1.1): 3 times as much"
        in found.reason
    )
    assert answer([together(), separate(3.0, 3.3)]).headline.startswith("don't disaggregate: no difference")


def test_the_ceiling_is_reported_even_where_the_load_is_carried() -> None:
    found = answer([together(), separate()], Criteria(rate=1.0))
    assert "nothing to gain" in found.reason
    assert "Above that load separation would pay" in found.otherwise
    assert not answer([together(), separate(3.0, 3.3)], Criteria(rate=1.0)).otherwise


def test_a_rate_that_neither_carries_is_reported() -> None:
    assert "needs more hardware" in answer([together(), separate()], Criteria(rate=20.0)).otherwise


def test_a_candidate_that_failed_requests_is_reported() -> None:
    found = answer([together(), separate(failed=2), separate(4.0, 4.4)])
    assert found.verdict is Verdict.DISAGGREGATE
    assert any("failed 2 requests" in note for note in found.notes)
