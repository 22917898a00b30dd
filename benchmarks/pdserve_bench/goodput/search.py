"""Search the highest rate at which a share of the requests keeps an SLO. Pure: the caller runs the probes.

The rate rises or falls by factors of at most two until one rate is carried (enough requests keep the SLO) and a higher
one is broken. Then the interval is bisected (logarithmically) down to the precision. Its ends are probed again until
they are certain (Wilson's interval), with at most `TRIES` probes each. If that overturns an end, the search continues
from there. A non-increasing curve is fitted to the shares of all rates (`samples.falling`)."""

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
        """Share of all samples. If `TRIES` samples contradict each other, their median: the machine disturbed some."""
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
    """True if surely at least `share` keep the SLO, False if surely fewer do; None: uncertain."""
    low, high = wilson(kept, requests)
    return True if low >= share else False if high < share else None


class GoodputSearch:
    """Call `next` and `tell` in turn until `next` returns None. Results can be read at any time."""

    def __init__(
        self,
        start: float = 4.0,
        share: float = SHARE,
        precision: float = 0.1,
        lowest: float = 0.05,
        highest: float = 1000.0,
        most: int = 24,
    ) -> None:
        """Rates in requests per second. `precision`: relative width of the final interval. `most`: probes at most."""
        self.share, self.precision, self.probes = share, precision, 0
        self._start, self._lowest, self._highest, self._most = start, lowest, highest, most
        self._rates: dict[float, _Rate] = {}

    def tell(self, rate: float, kept: int, requests: int) -> None:
        """Record a probe, at any rate."""
        self.probes += 1
        found = self._rates.setdefault(rate, _Rate(self.share))
        found.samples.append((kept, requests))

    def next(self) -> float | None:
        """Return the next rate to probe; None when found, out of bounds, or after `most` probes."""
        if not self._rates:
            return self._start
        if self.probes >= self._most:
            return None
        low, high = self.carried, self.broken
        if low is None:
            assert high is not None
            if not self._rates[high].sure and (again := self._again(high)):
                return again  # the server may have been cold in the first probe
            return self._beyond(high, 1 - self._shares[high] / self.share, self._lowest)
        if high is None:
            room = max(1e-9, 1 - self.share)
            return self._beyond(low, (self._shares[low] - self.share) / room, self._highest)
        if not self._narrow(low, high):
            return self._rounded(math.sqrt(low * high))
        return self._again(high) or self._again(low)

    @property
    def carried(self) -> float | None:
        """Highest rate found to be carried; None if no tried rate is carried."""
        return max((rate for rate, share in self._shares.items() if share >= self.share), default=None)

    @property
    def broken(self) -> float | None:
        """Lowest rate found not to be carried; None if all tried rates are carried."""
        return min((rate for rate, share in self._shares.items() if share < self.share), default=None)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """Highest certain rate up to `carried`, and lowest certain rate from `broken` on; None without one."""
        low, high = self.carried, self.broken
        sure = {rate for rate, found in self._rates.items() if found.sure}
        return (
            max((rate for rate in sure if low is not None and rate <= low), default=None),
            min((rate for rate in sure if high is not None and rate >= high), default=None),
        )

    @property
    def estimate(self) -> float | None:
        """The interpolated rate at which the share is just kept (linear in the logarithm of the rate). None if no rate
        is carried; if all are, the highest."""
        low, high, shares = self.carried, self.broken, self._shares
        if low is None or high is None:
            return low
        part = (shares[low] - self.share) / (shares[low] - shares[high])
        return float(low * (high / low) ** part)

    @property
    def found(self) -> bool:
        """Whether the interval is as narrow as `precision` asks."""
        low, high = self.carried, self.broken
        return low is not None and high is not None and self._narrow(low, high)

    @property
    def _shares(self) -> dict[float, float]:
        """Fitted share of kept requests by rate, in order."""
        rates = sorted(self._rates)
        found = [self._rates[rate] for rate in rates]
        shares = falling([each.share for each in found], [max(1, each.requests) for each in found])
        return dict(zip(rates, shares, strict=True))

    def _narrow(self, low: float, high: float) -> bool:
        return high / low <= (1 + self.precision) * (1 + 1e-9)

    def _beyond(self, end: float, far: float, bound: float) -> float | None:
        """Return a rate beyond `end`, the lowest or highest probed one. `far` is the distance of the share at `end`
        from the target (0 to 1): a small distance takes a small step."""
        if end == bound:
            return self._again(end)
        step = min(_STEP, max((1 + self.precision) ** 1.98, _STEP ** (1.5 * far)))
        return self._rounded(min(end * step, bound) if end < bound else max(end / step, bound))

    def _rounded(self, rate: float) -> float:
        """Round to four digits, as displayed."""
        return float(f"{rate:.4g}")

    def _again(self, rate: float) -> float | None:
        """Return this rate if its samples are insufficient. A broken rate is probed twice, because a busy moment of the
        machine can break a good rate, but cannot make a bad one carried."""
        found = self._rates[rate]
        enough = 1 if found.share >= self.share else 2
        if len(found.samples) >= TRIES or (found.sure and len(found.samples) >= enough):
            return None
        return rate
