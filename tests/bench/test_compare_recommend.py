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
    name = "1 prefill + 1 decode, remote above 64 tokens"
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
    "more hardware does not count": ([together(), separate(hardware=2.0)], Criteria(), Verdict.UNKNOWN),
    "a simulated one does not beat a measured one": (
        [together(), separate(simulated=True)],
        Criteria(),
        Verdict.UNKNOWN,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    findings, criteria, verdict = CASES[case]
    assert recommend(findings, criteria).verdict is verdict


def answer(findings: Sequence[CandidateResult], criteria: Criteria | None = None) -> Recommendation:
    return recommend(findings, criteria or Criteria())


def test_what_is_chosen_is_named_with_the_numbers() -> None:
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


def test_that_separation_loses_is_told_with_the_numbers() -> None:
    found = answer([together(), separate(1.0, 1.1)])
    assert found.headline == "don't disaggregate: run 1 engine x 2 threads, batch 512."
    assert (
        "carries 3.15 (3 to 3.3) requests/s, 1 prefill + 1 decode 1.05 (1 to 1.1): 3 times as much"
        in found.reason
    )
    assert answer([together(), separate(3.0, 3.3)]).headline.startswith("don't disaggregate: no difference")


def test_the_ceiling_is_told_even_where_the_load_is_carried() -> None:
    found = answer([together(), separate()], Criteria(rate=1.0))
    assert "nothing to gain" in found.reason
    assert "Above that load separation would pay" in found.otherwise
    assert not answer([together(), separate(3.0, 3.3)], Criteria(rate=1.0)).otherwise


def test_more_than_both_carry_is_told() -> None:
    assert "needs more hardware" in answer([together(), separate()], Criteria(rate=20.0)).otherwise


def test_a_candidate_that_is_out_is_told() -> None:
    found = answer([together(), separate(failed=2), separate(4.0, 4.4)])
    assert found.verdict is Verdict.DISAGGREGATE
    assert any("failed 2 requests" in note for note in found.notes)


def test_simulated_ones_are_compared_with_each_other_and_it_is_said() -> None:
    found = answer([together(), together(simulated=True), separate(simulated=True)])
    assert found.verdict is Verdict.DISAGGREGATE
    assert found.simulated
    assert found.headline.startswith("Simulated: ")


def test_another_split_is_suggested_from_simulations() -> None:
    findings = [
        together(),
        separate(),
        separate(8.5, 9.3, simulated=True),
        separate(15.0, 16.0, simulated=True, split="2P+1D"),
        separate(30.0, 33.0, simulated=True, split="3P+3D", hardware=2.0),
    ]
    notes = " ".join(answer(findings).notes)
    assert "it says 8.9 (8.5 to 9.3) requests/s for 1P+1D, where 9.45 (9 to 9.9) were measured" in notes
    assert "Try 2P+1D: simulated" in notes
    assert "3P+3D carries most" in notes
