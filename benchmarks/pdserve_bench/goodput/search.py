"""The search for the highest rate at which a share of the requests keeps an SLO. Pure: it is told what probes have
found, and says which rate to try next.

From a start rate it goes up or down by factors of at most two until one rate is carried and a higher one is not, then
halves the interval between them (on a logarithmic scale) until it is as narrow as asked for. What a probe
finds is a binomial sample, so near the border it may be wrong: the ends of the last interval are probed again, under
other seeds, until their pooled samples are sure (Wilson's interval), and no more than `TRIES` times. Where that
overturns an end, the search goes on from there. All samples count at any time: the shares of all rates are fitted by a
curve that never rises (`samples.falling`), so that outcomes that are not monotone pool instead of contradicting.
"""

import math
import statistics
from dataclasses import dataclass, field

from pdserve_bench.measure.samples import falling, wilson
from pdserve_bench.measure.slo import SHARE

TRIES = 3
_STEP = 2.0


@dataclass
class _Rate:
    asked: float
    samples: list[tuple[int, int]] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(kept for kept, _ in self.samples)

    @property
    def requests(self) -> int:
        return sum(requests for _, requests in self.samples)

    @property
    def share(self) -> float:
        """The pooled one; of probes that contradict each other the median, for then the machine disturbed some."""
        if len(self.samples) >= TRIES and self._contradict:
            return statistics.median(kept / requests if requests else 1.0 for kept, requests in self.samples)
        return self.kept / self.requests if self.requests else 1.0

    @property
    def sure(self) -> bool:
        return _sure(self.kept, self.requests, self.asked) is not None and not self._contradict

    @property
    def _contradict(self) -> bool:
        return len({_sure(*sample, self.asked) for sample in self.samples} - {None}) > 1


def _sure(kept: int, requests: int, share: float) -> bool | None:
    """Whether more than the share keep it, or fewer; None: the sample does not tell."""
    low, high = wilson(kept, requests)
    return True if low >= share else False if high < share else None


class GoodputSearch:
    """`next` and `tell` in turn, until `next` is None. What is known can be read at any time."""

    def __init__(
        self,
        start: float = 4.0,
        share: float = SHARE,
        precision: float = 0.1,
        lowest: float = 0.05,
        highest: float = 1000.0,
        most: int = 24,
    ) -> None:
        """Rates are requests per second. `precision` is how much higher than the carried rate the one may be that is
        known not to be, as a share of it; `most` bounds the probes."""
        self.share, self.precision, self.probes = share, precision, 0
        self._start, self._lowest, self._highest, self._most = start, lowest, highest, most
        self._rates: dict[float, _Rate] = {}

    def tell(self, rate: float, kept: int, requests: int) -> None:
        """A probe at this rate, which need not be the one that was asked for, has ended."""
        self.probes += 1
        found = self._rates.setdefault(rate, _Rate(self.share))
        found.samples.append((kept, requests))

    def next(self) -> float | None:
        """The rate to probe, or None: it is found, or it cannot be found within the bounds."""
        if not self._rates:
            return self._start
        if self.probes >= self._most:
            return None
        low, high = self.carried, self.broken
        if low is None:
            assert high is not None
            if not self._rates[high].sure and (again := self._again(high)):
                return again  # the first probe may have met a server that was not warm yet
            return self._beyond(high, 1 - self._shares[high] / self.share, self._lowest)
        if high is None:
            room = max(1e-9, 1 - self.share)
            return self._beyond(low, (self._shares[low] - self.share) / room, self._highest)
        if not self._narrow(low, high):
            return self._rounded(math.sqrt(low * high))
        return self._again(high) or self._again(low)

    @property
    def carried(self) -> float | None:
        """The highest rate that was found to be carried; None: not even the lowest that was tried."""
        return max((rate for rate, share in self._shares.items() if share >= self.share), default=None)

    @property
    def broken(self) -> float | None:
        """The lowest rate that was found not to be carried; None: no rate was too high."""
        return min((rate for rate, share in self._shares.items() if share < self.share), default=None)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """`carried` and `broken` among the rates whose samples leave no doubt: the border is between them. None where
        there is no such rate."""
        low, high = self.carried, self.broken
        sure = {rate for rate, found in self._rates.items() if found.sure}
        return (
            max((rate for rate in sure if low is not None and rate <= low), default=None),
            min((rate for rate in sure if high is not None and rate >= high), default=None),
        )

    @property
    def estimate(self) -> float | None:
        """The rate between the two at which the share is just kept, if it falls evenly with the logarithm of the rate.
        None where no rate is carried; where each is, the highest of them."""
        low, high, shares = self.carried, self.broken, self._shares
        if low is None or high is None:
            return low
        part = (shares[low] - self.share) / (shares[low] - shares[high])
        return float(low * (high / low) ** part)

    @property
    def found(self) -> bool:
        """Between a rate that is carried and one that is not, as near to each other as was asked for."""
        low, high = self.carried, self.broken
        return low is not None and high is not None and self._narrow(low, high)

    @property
    def _shares(self) -> dict[float, float]:
        """Each rate that was probed, in order, and the share of the requests that keep the SLO there."""
        rates = sorted(self._rates)
        found = [self._rates[rate] for rate in rates]
        shares = falling([each.share for each in found], [max(1, each.requests) for each in found])
        return dict(zip(rates, shares, strict=True))

    def _narrow(self, low: float, high: float) -> bool:
        return high / low <= (1 + self.precision) * (1 + 1e-9)

    def _beyond(self, end: float, far: float, bound: float) -> float | None:
        """Return a rate beyond the lowest or highest that was probed. How far its share is from the one that is asked
        for (0: it is that; 1: as far as can be) says how near the border may be."""
        if end == bound:
            return self._again(end)
        step = min(_STEP, max((1 + self.precision) ** 1.98, _STEP ** (1.5 * far)))
        return self._rounded(min(end * step, bound) if end < bound else max(end / step, bound))

    def _rounded(self, rate: float) -> float:
        """To four digits, as it is shown."""
        return float(f"{rate:.4g}")

    def _again(self, rate: float) -> float | None:
        """Return this rate if its samples do not suffice. What broke is probed twice: a machine that was busy for a
        moment breaks a rate, and carries none that is too high."""
        found = self._rates[rate]
        enough = 1 if found.share >= self.share else 2
        if len(found.samples) >= TRIES or (found.sure and len(found.samples) >= enough):
            return None
        return rate
