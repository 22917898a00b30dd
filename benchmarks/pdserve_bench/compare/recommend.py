"""Recommend a candidate from the measured results. Pure. The rules, in this order:
1. A candidate that failed requests or did not start is out.
2. If the best aggregated one carries the given rate with headroom, it wins.
3. The higher goodput wins if the intervals (`carried` to `broken`) do not overlap and the gain exceeds the noise.
4. The best aggregated one wins, because it is simpler.
If too few requests were judged for a rule that is needed, nothing is recommended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve_bench.measure.samples import wilson
from pdserve_bench.measure.slo import SHARE, Slo, Tally

HEADROOM = 1.25
"""An engine carries a rate safely if it carries this many times the rate."""
QUIET = 0.1
"""CPU share of other programs above which the result is doubtful."""
LEAST_NOISE = 0.05
"""Assumed noise if less, or none, was measured."""


class Verdict(StrEnum):
    DISAGGREGATE = "disaggregate"
    DONT = "don't"
    SAME = "no difference"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class AtLoad:
    """Latencies in seconds at one rate."""

    rate: float
    kept: int
    requests: int
    ttft: tuple[float, float] = (0.0, 0.0)
    """Median and 90th percentile."""
    gap: tuple[float, float] = (0.0, 0.0)
    """Median and 90th percentile of each request's longest gap."""

    @property
    def share(self) -> float:
        return self.kept / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class CandidateResult:
    """Results of a candidate. Rates are requests per second."""

    name: str
    aggregated: bool
    carried: float | None = None
    """Highest tried rate at which enough requests kept the SLO; None without one."""
    broken: float | None = None
    """Lowest tried rate at which too few requests kept the SLO; None without one."""
    estimate: float | None = None
    """Goodput, interpolated between `carried` and `broken`."""
    broke: Tally = field(default_factory=Tally)
    """Requests at `broken` by how they met the SLO."""
    failed: int = 0
    """Requests with an error at carried rates; if no rate is carried, at the lowest rate."""
    split: str = ""
    """`2P+1D`, or `3 engines`."""
    load: AtLoad | None = None
    problem: str = ""
    """Why it was not measured."""
    thin: str = ""
    """Set if too few requests were judged at `carried` or `broken`, as `8 requests at 2 requests/s`."""

    @property
    def probed(self) -> bool:
        return self.carried is not None or self.broken is not None

    @property
    def sound(self) -> bool:
        return self.probed and not self.problem and not self.failed

    @property
    def least(self) -> float:
        return self.carried or 0.0

    @property
    def most(self) -> float:
        return self.broken if self.broken is not None else float("inf")

    @property
    def goodput(self) -> float:
        return self.estimate or 0.0


@dataclass(frozen=True)
class Recommendation:
    verdict: Verdict
    choice: CandidateResult | None
    """The candidate to run; None without any."""
    reason: str
    otherwise: str = ""
    """What would change the result."""
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    """Sentences: why a repetition may give another result."""

    @property
    def headline(self) -> str:
        doubt = "in doubt: " if self.doubts else ""
        if self.verdict is Verdict.UNKNOWN or self.choice is None:
            return "No recommendation."
        if self.verdict is Verdict.DISAGGREGATE:
            return f"{doubt}disaggregate: {self.choice.name}."
        if self.verdict is Verdict.DONT:
            return f"{doubt}don't disaggregate: run {_bare(self.choice)}."
        simpler = f"run {_bare(self.choice)}, the simpler one"
        return f"{doubt}don't disaggregate: no difference could be measured; {simpler}."


@dataclass(frozen=True)
class Criteria:
    slo: Slo = field(default_factory=Slo)
    share: float = SHARE
    rate: float | None = None
    """Requests per second that the user needs; None: maximal goodput counts."""
    noise: float | None = None
    """Relative difference of two measurements of one system; None: not measured."""
    foreign: float | None = None
    """CPU share of other programs during the probes; None: unknown."""

    @property
    def doubts(self) -> tuple[str, ...]:
        found = []
        if self.noise is None:
            found.append(
                "The noise of this machine is unknown, because the aggregated engine was not measured twice."
            )
        if self.foreign is None:
            found.append("The CPU share of other programs is unknown.")
        elif self.foreign > QUIET:
            found.append(
                f"Other programs took {self.foreign:.0%} of this machine's CPU meanwhile: "
                "measure where nothing else runs."
            )
        return tuple(found)


def recommend(findings: Sequence[CandidateResult], criteria: Criteria) -> Recommendation:
    """Apply the rules. Of equal findings of a kind, the first wins."""
    out = tuple(_why_out(finding) for finding in findings if finding.problem or finding.failed)
    together, separate = _best(findings, True), _best(findings, False)
    if together is None or separate is None:
        return _one_sided(together or separate, findings, out)
    surely = criteria.rate is not None and together.least >= criteria.rate * HEADROOM
    if thin := [each for each in (together, separate) if each.thin and not (surely and each is separate)]:
        few = ", ".join(f"{_bare(each)} by {each.thin}" for each in thin)
        reason = f"Too few requests were judged for an answer: {few}. Give --minutes more."
        return Recommendation(Verdict.UNKNOWN, None, reason, notes=out, doubts=criteria.doubts)
    verdict, reason, otherwise = _judge(together, separate, criteria)
    choice = separate if verdict is Verdict.DISAGGREGATE else together
    return Recommendation(verdict, choice, reason, otherwise, out, criteria.doubts)


def _best(findings: Sequence[CandidateResult], aggregated: bool) -> CandidateResult | None:
    fit = [each for each in findings if each.aggregated == aggregated and each.sound]
    return max(fit, key=lambda each: each.goodput, default=None)  # the first of equals


def _judge(together: CandidateResult, separate: CandidateResult, asked: Criteria) -> tuple[Verdict, str, str]:
    """Return the verdict, its reason, and what would change it."""
    rate, noise = asked.rate, max(asked.noise or 0.0, LEAST_NOISE)
    both = f"{_carries(separate)}, {_bare(together)} {_number(together)}"
    if not together.carried and not separate.carried:
        reason = (
            f"Neither keeps the SLO ({asked.slo}, {asked.share:.0%} of the requests), not even at "
            f"{min(together.most, separate.most):.3g} requests/s: {_broke(together)}; {_broke(separate)}."
        )
        return Verdict.DONT, reason, ""
    pays = separate.least >= together.most and _ratio(separate, together, asked.share) > 1 + noise
    more = _times(separate, together, asked.share)
    if rate is not None and together.least >= rate * HEADROOM:
        reason = (
            f"At {rate:.3g} requests/s there is nothing to gain: {_bare(together)} keeps the SLO up to "
            f"{_range(together)} requests/s."
        )
        ceiling = f"Above that load separation would pay: {_carries(separate)}{more}." if pays else ""
        return Verdict.DONT, reason, ceiling
    if pays:
        over = ""
        if rate is not None and separate.most <= rate:
            over = (
                f"Neither carries the {rate:.3g} requests/s that were asked about: that needs more hardware."
            )
        return Verdict.DISAGGREGATE, f"{both}{more}. {_limits(together, separate)}", over
    if together.least >= separate.most and _ratio(together, separate, asked.share) > 1 + noise:
        carried = f"{_carries(together)}, {_bare(separate)} {_number(separate)}"
        times = _times(together, separate, asked.share)
        return Verdict.DONT, f"{carried}{times}. {_limits(separate, together)}", ""
    if together.broken is None and separate.broken is None:
        reason = f"{both}: both carried every rate that was tried."
        return Verdict.SAME, reason, "Give --minutes more, or give the --rate of your users."
    itself = f" (the same system against itself: {asked.noise:.0%})" if asked.noise else ""
    reason = f"{both}: the difference is too small to be certain{itself}."
    return Verdict.SAME, reason, "Longer probes (--minutes) would tell smaller differences apart."


def _one_sided(
    found: CandidateResult | None, findings: Sequence[CandidateResult], out: tuple[str, ...]
) -> Recommendation:
    if found is None:
        return Recommendation(Verdict.UNKNOWN, None, "Nothing was measured: give --minutes more.", notes=out)
    missing = "disaggregated" if found.aggregated else "aggregated"
    known = [each for each in findings if each.aggregated != found.aggregated]
    if known and found.aggregated and all(each.failed for each in known):
        reason = f"Every disaggregated graph dropped requests; {_carries(found)}."
        return Recommendation(Verdict.DONT, found, reason, notes=out)
    reason = f"No {missing} graph was measured, so there is nothing to compare {_bare(found)} with."
    return Recommendation(Verdict.UNKNOWN, None, reason, notes=out)


_CAUSES = {
    ("gap", True): "gaps: prompts that are computed delay the tokens of running answers",
    ("gap", False): "gaps: the decode side is the bottleneck",
    ("TTFT", True): "TTFT: prompts wait for their turn",
    ("TTFT", False): "TTFT: prompts queue for the prefill side, which is the bottleneck",
}
"""By the bound that breaks first, and whether the graph is aggregated."""


def _limits(loser: CandidateResult, winner: CandidateResult) -> str:
    """Say which bound of the SLO breaks first in loser and winner, and why."""
    name = _bare(loser)
    said = f"{name[0].upper()}{name[1:]} breaks first on {_cause(loser)}"
    return f"{said}." if winner.broken is None else f"{said}; {_bare(winner)} on {_cause(winner)}."


def _cause(finding: CandidateResult) -> str:
    broke = finding.broke
    counts = {
        "gap": broke.gap + broke.both,
        "TTFT": broke.ttft + broke.both,
        "failed": broke.failed,
        "unfinished": broke.unfinished,
    }
    first = max(counts, key=lambda name: counts[name])
    return _CAUSES.get((first, finding.aggregated), f"{first} requests")


def _broke(finding: CandidateResult) -> str:
    return (
        f"{_bare(finding)} broke {finding.broke.describe() or 'nothing'} of {finding.broke.requests} requests"
    )


def _why_out(finding: CandidateResult) -> str:
    if finding.problem:
        return f"Not measured: {finding.name}: {finding.problem}"
    noun = "request" if finding.failed == 1 else "requests"
    return f"Out: {finding.name}: it failed {finding.failed} {noun} at a rate that it should carry."


def _bare(finding: CandidateResult) -> str:
    """Return the name as the subject of a sentence."""
    return finding.name.removeprefix("aggregated: ")


def _carries(finding: CandidateResult) -> str:
    text = f"{_bare(finding)} carries {_number(finding)} requests/s"
    return text[0].upper() + text[1:]


def _number(finding: CandidateResult) -> str:
    if finding.carried is None:
        return f"under {finding.most:.3g}"
    if finding.broken is None:
        return f"{finding.carried:.3g} and more"
    return f"{finding.goodput:.3g} ({_range(finding)})"


def _range(finding: CandidateResult) -> str:
    if finding.broken is None:
        return f"{finding.least:.3g} and more"
    return f"{finding.least:.3g} to {finding.most:.3g}"


def _ratio(ours: CandidateResult, other: CandidateResult, share: float) -> float:
    """Return the ratio of goodputs. If `other` carries no tried rate: infinity if that is sure, else a lower bound."""
    if other.goodput:
        return ours.goodput / other.goodput
    judged = other.broke.requests - other.broke.unfinished
    if wilson(other.broke.kept, judged)[1] < share:
        return float("inf")
    return ours.goodput / other.most if other.most else 1.0


def _times(winner: CandidateResult, loser: CandidateResult, share: float) -> str:
    """Return the winner's goodput relative to the loser's, or a lower bound, as text; empty from 100 on."""
    gain, sure = _ratio(winner, loser, share), winner.least / loser.most
    if gain >= 100:
        return ""
    return f": at least {sure:.2g} times as much" if gain > 1.25 * sure > 0 else f": {gain:.2g} times as much"
