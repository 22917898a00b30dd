"""How fast turns come while somebody waits for one."""

import math

_MEMORY = 30.0
"""seconds; what was longer ago counts less and less"""
_ENOUGH = 1.0
"""seconds of waiting that have to be seen"""


class AdmissionRate:
    """Counts the time in which somebody waits, and no other: that nobody came says nothing about how fast the
    graph is. Admissions are counted in tokens. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._tokens = 0.0

    def waiting(self, anybody: bool, now: float) -> None:
        """Whether from now on somebody waits."""
        self._go_on(now)
        self._since = now if anybody else None

    def turn(self, tokens: float, now: float) -> None:
        """Somebody who waited has got a turn."""
        self._go_on(now)
        self._tokens += tokens

    def seconds(self, tokens: float, now: float) -> float | None:
        """Until turns of so many tokens will have come; None while too little was seen."""
        self._go_on(now)
        if not tokens:
            return 0.0
        if self._seconds < _ENOUGH or not self._tokens:
            return None
        return tokens * self._seconds / self._tokens

    def _go_on(self, now: float) -> None:
        if self._since is None:
            return
        kept = math.exp((self._since - now) / _MEMORY)
        self._tokens *= kept
        self._seconds = self._seconds * kept + _MEMORY * (1 - kept)
        self._since = now
