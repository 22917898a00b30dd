"""Service level objectives: what a request must keep to be worth something to its user (goodput counts those only)."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from pdserve_bench.client import Exchange, Outcome

SHARE = 0.9
"""of the requests that must keep it where a rate is said to be carried: goodput as DistServe (OSDI 2024) defines it"""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}


def seconds(text: str) -> float:
    """Of `500ms`, `0.5s` or `0.5`. Raises ValueError with what is wrong."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if found is None or found[2] not in (*_UNITS, ""):
        raise ValueError(f"{text!r} is no time: write it as 500ms or 0.5s")
    value = float(found[1]) * _UNITS.get(found[2], 1.0)
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{text!r} must be more than nothing")
    return value


@dataclass(frozen=True)
class Slo:
    """Bounds for a request, in seconds."""

    ttft: float = 0.5
    gap: float = 0.06
    """the longest wait between two of its tokens"""

    def __str__(self) -> str:
        return f"TTFT {1000 * self.ttft:g} ms, no gap over {1000 * self.gap:g} ms"

    def kept(self, exchange: Exchange) -> bool:
        """A request that failed, or is not finished, has kept nothing."""
        return (
            exchange.outcome is Outcome.FINISHED
            and exchange.ttft is not None
            and exchange.ttft <= self.ttft
            and max(exchange.gaps, default=0.0) <= self.gap
        )

    def attainment(self, exchanges: Collection[Exchange]) -> float:
        """The share of the requests that keep it; 1 of none."""
        return sum(map(self.kept, exchanges)) / len(exchanges) if exchanges else 1.0
