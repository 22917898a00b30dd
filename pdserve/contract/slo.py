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
SHORTEST, LONGEST = 0.001, 3600.0
"""seconds that may be promised"""
UNSURE = 0.4
"""of the time to a first token: part by which it may be shorter or longer than expected; others come meanwhile"""
UNEVEN = 0.3
"""of a step with a chunk of a prompt in it: part by which the longest of several is longer than the mean"""
MATTERS = 0.05
"""a smaller difference in expected broken promises decides nothing"""
OFF = "off"
"""the value of a live setting: nothing is promised"""
DURATION = f"a duration with its unit, 1ms to {LONGEST:g}s, as in 500ms or 2s"
SPARE = "~"
"""begins the names of clients as senders of spare requests, which have their turn only where no other request waits"""
_UNITS = {"ms": 1000.0, "s": 1.0}


@dataclass(frozen=True)
class Promised:
    """Both in seconds; None: not promised."""

    ttft: float | None = None
    """from a request's arrival to its first token"""
    gap: float | None = None
    """between two tokens"""

    def __bool__(self) -> bool:
        return self.ttft is not None or self.gap is not None

    def loosened(self, headers: Mapping[str, str]) -> "Promised":
        """Return the promise of a request with these headers. Raises BadRequest."""
        return Promised(_loosened(self.ttft, headers, TTFT_HEADER), _loosened(self.gap, headers, GAP_HEADER))

    def __str__(self) -> str:
        parts = []
        if self.ttft is not None:
            parts.append(f"the first token within {shown(self.ttft)}")
        if self.gap is not None:
            parts.append(f"gaps of {shown(self.gap)} at most")
        return ", ".join(parts) or "nothing"


NO_PROMISE = Promised()


def is_spare(client: str) -> bool:
    return client.startswith(SPARE)


def seconds(text: str) -> float:
    """Read a duration: `500ms`, `2s`. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s)", text, re.ASCII)
    value = float(found[1]) / _UNITS[found[2]] if found else 0.0
    if not SHORTEST <= value <= LONGEST:
        raise ValueError(f"not {DURATION}")
    return value


def shown(value: float | None) -> str:
    """Write a duration so that `seconds` reads it; `off` for None."""
    if value is None:
        return OFF
    return f"{value * 1000:.6g}ms" if value < 1 else f"{value:.6g}s"


def tightest(promises: Iterable[Promised]) -> Promised:
    """Merge what the files of several workers promise."""
    known = list(promises)
    ttfts = [each.ttft for each in known if each.ttft is not None]
    gaps = [each.gap for each in known if each.gap is not None]
    return Promised(min(ttfts, default=None), min(gaps, default=None))


def late(seconds: float, left: float) -> float:
    """The probability that a first token, expected in so many seconds, comes later than `left` seconds from now."""
    if left <= 0:
        return 1.0
    return _ramp(seconds / left, 1 - UNSURE, 1 + UNSURE)


def torn(seconds: float, gap: float) -> float:
    """The probability that a gap, of so many seconds as a mean, is longer than the promised one."""
    return _ramp(seconds / gap, 1 - UNEVEN, 1.0)


def _ramp(value: float, none: float, sure: float) -> float:
    return min(1.0, max(0.0, (value - none) / (sure - none)))


def _loosened(promised: float | None, headers: Mapping[str, str], name: str) -> float | None:
    """Where nothing is promised, the header means nothing, as to a server that does not know it."""
    if promised is None or (text := headers.get(name)) is None:
        return promised
    try:
        asked = float(text) / 1000
    except ValueError:
        asked = math.nan
    if not 0 < asked <= LONGEST:  # also catches NaN
        message = f"{name} must be a number of milliseconds above 0 and up to {LONGEST * 1000:.0f}"
        raise BadRequest(message, name)
    return max(promised, asked)
