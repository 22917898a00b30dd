"""The promise (SLO) of a model and of one of its requests: the time to the first token, and the longest gap between two
tokens. Pure.

A file has it in its section `Slo`, `pdserve set` changes it live, and headers of a request loosen it. They never
tighten it: the tightest promise is served first, so that any client could overtake all others by asking for more
(docs/decisions/0060-the-promise.md)."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.util.errors import BadRequest

TTFT_HEADER, GAP_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
"""as the Gateway API's latency routing names them; milliseconds"""
MIN_SECONDS, MAX_SECONDS = 0.001, 3600.0
"""seconds that may be promised"""
TTFT_UNCERTAINTY = 0.4
"""of the time to a first token: part by which it may be shorter or longer than expected; others come meanwhile"""
GAP_VARIATION = 0.3
"""of a step with a chunk of a prompt in it: part by which the longest of several is longer than the mean"""
MIN_MISS_DIFFERENCE = 0.05
"""a smaller difference in expected broken promises decides nothing"""
OFF = "off"
"""the value of a live setting: nothing is promised"""
DURATION = f"a duration with its unit, 1ms to {MAX_SECONDS:g}s, as in 500ms or 2s"
FLEX_PREFIX = "~"
"""begins the names of clients as senders of spare requests, which have their turn only where no other request waits"""
_UNITS = {"ms": 1000.0, "s": 1.0}


@dataclass(frozen=True)
class SloTargets:
    """Both in seconds; None: not promised."""

    ttft: float | None = None
    """from a request's arrival to its first token"""
    gap: float | None = None
    """between two tokens"""

    def __bool__(self) -> bool:
        return self.ttft is not None or self.gap is not None

    def relaxed(self, headers: Mapping[str, str]) -> "SloTargets":
        """Return the promise of a request with these headers. Raises BadRequest."""
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
    """Read a duration: `500ms`, `2s`. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s)", text, re.ASCII)
    value = float(found[1]) / _UNITS[found[2]] if found else 0.0
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise ValueError(f"not {DURATION}")
    return value


def format_duration(value: float | None) -> str:
    """Write a duration so that `seconds` reads it; `off` for None."""
    if value is None:
        return OFF
    return f"{value * 1000:.6g}ms" if value < 1 else f"{value:.6g}s"


def tightest_slo(promises: Iterable[SloTargets]) -> SloTargets:
    """Merge what the files of several workers promise."""
    known = list(promises)
    ttfts = [each.ttft for each in known if each.ttft is not None]
    gaps = [each.gap for each in known if each.gap is not None]
    return SloTargets(min(ttfts, default=None), min(gaps, default=None))


def ttft_miss_probability(seconds: float, left: float) -> float:
    """The probability that a first token, expected in so many seconds, comes later than `left` seconds from now."""
    if left <= 0:
        return 1.0
    return _ramp(seconds / left, 1 - TTFT_UNCERTAINTY, 1 + TTFT_UNCERTAINTY)


def gap_miss_probability(seconds: float, gap: float) -> float:
    """The probability that a gap, of so many seconds as a mean, is longer than the promised one."""
    return _ramp(seconds / gap, 1 - GAP_VARIATION, 1.0)


def _ramp(value: float, none: float, sure: float) -> float:
    return min(1.0, max(0.0, (value - none) / (sure - none)))


def _relaxed(promised: float | None, headers: Mapping[str, str], name: str) -> float | None:
    """Where nothing is promised, the header means nothing, as to a server that does not know it."""
    if promised is None or (text := headers.get(name)) is None:
        return promised
    try:
        asked = float(text) / 1000
    except ValueError:
        asked = math.nan
    if not 0 < asked <= MAX_SECONDS:  # also catches NaN
        message = f"{name} must be a number of milliseconds above 0 and up to {MAX_SECONDS * 1000:.0f}"
        raise BadRequest(message, name)
    return max(promised, asked)
