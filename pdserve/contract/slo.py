"""The SLO of a model and of its requests: TTFT and the longest gap between two tokens. Pure.

A model's file sets it in the section `Slo`, `pdserve set` changes it live, and a request's headers relax it. Headers
never tighten it, because a tighter gap makes the chunk smaller for all clients (docs/decisions/0060-the-promise.md)."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.util.errors import BadRequest

TTFT_HEADER, GAP_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
"""Milliseconds; the names are those of the Gateway API's latency routing."""
MIN_SECONDS, MAX_SECONDS = 0.001, 3600.0
"""Bounds of an SLO in seconds."""
TTFT_UNCERTAINTY = 0.4
"""Relative uncertainty of a predicted TTFT (0.4 = +-40 %), because other requests arrive meanwhile."""
GAP_VARIATION = 0.3
"""The mean of several gaps is up to this share below the longest of them."""
MIN_MISS_DIFFERENCE = 0.05
"""If two workers, or local and remote prefill, differ by less in expected SLO misses, policy or cost decides."""
OFF = "off"
"""Value of a live setting: no SLO."""
DURATION = f"a duration with its unit, 1ms to {MAX_SECONDS:g}s, as in 500ms or 2s"
FLEX_PREFIX = "~"
"""Prefix of a client's name for its flex requests."""
_UNITS = {"ms": 1000.0, "s": 1.0}


@dataclass(frozen=True)
class SloTargets:
    """An SLO in seconds; None: no SLO."""

    ttft: float | None = None
    """from a request's arrival to its first token"""
    gap: float | None = None
    """longest time between two tokens"""

    def __bool__(self) -> bool:
        return self.ttft is not None or self.gap is not None

    def relaxed(self, headers: Mapping[str, str]) -> "SloTargets":
        """Return the SLO of a request with these headers. Raises BadRequest."""
        return SloTargets(_relaxed(self.ttft, headers, TTFT_HEADER), _relaxed(self.gap, headers, GAP_HEADER))

    def __str__(self) -> str:
        parts = []
        if self.ttft is not None:
            parts.append(f"the first token within {format_duration(self.ttft)}")
        if self.gap is not None:
            parts.append(f"gaps of {format_duration(self.gap)} at most")
        return ", ".join(parts) or "nothing"


NO_SLO = SloTargets()


def is_flex(client: str) -> bool:
    return client.startswith(FLEX_PREFIX)


def parse_duration(text: str) -> float:
    """Parse `500ms` or `2s` to seconds. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s)", text, re.ASCII)
    value = float(found[1]) / _UNITS[found[2]] if found else 0.0
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise ValueError(f"not {DURATION}")
    return value


def format_duration(value: float | None) -> str:
    """Return seconds as `500ms` or `2s`; `off` for None."""
    if value is None:
        return OFF
    return f"{value * 1000:.6g}ms" if value < 1 else f"{value:.6g}s"


def tightest_slo(slos: Iterable[SloTargets]) -> SloTargets:
    """Merge the SLOs in the files of several workers: the shortest of each time counts."""
    known = list(slos)
    ttfts = [each.ttft for each in known if each.ttft is not None]
    gaps = [each.gap for each in known if each.gap is not None]
    return SloTargets(min(ttfts, default=None), min(gaps, default=None))


def ttft_miss_probability(expected: float, left: float) -> float:
    """Return the probability that a first token expected in `expected` seconds takes more than `left` seconds."""
    if left <= 0:
        return 1.0
    return _ramp(expected / left, 1 - TTFT_UNCERTAINTY, 1 + TTFT_UNCERTAINTY)


def gap_miss_probability(mean: float, gap: float) -> float:
    """Return the probability that the longest gap exceeds `gap` seconds if gaps take `mean` seconds on average."""
    return _ramp(mean / gap, 1 - GAP_VARIATION, 1.0)


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _relaxed(seconds: float | None, headers: Mapping[str, str], name: str) -> float | None:
    """Return the longer of SLO and header, in seconds. Without an SLO, the header is ignored."""
    if seconds is None or (text := headers.get(name)) is None:
        return seconds
    try:
        asked = float(text) / 1000
    except ValueError:
        asked = math.nan
    if not 0 < asked <= MAX_SECONDS:  # also catches NaN
        message = f"{name} must be a number of milliseconds above 0 and up to {MAX_SECONDS * 1000:.0f}"
        raise BadRequest(message, name)
    return max(seconds, asked)
