"""Prefill workers that are registered and take no prompts: when they count as gone. Pure."""

from pdserve.decode.policy import decision

UNTAKEN = 2
"""prompts in a row that no prefill worker took, after which prefill workers count as gone"""
TRY_AGAIN = 30.0
"""seconds until remote prefill is tried again: a worker without prompts sends nothing"""


class UntakenPrompts:
    """Whether the prefill workers seem to be gone, though they are registered: prompts in a row that none took, and
    nothing heard of any meanwhile. Pure: times come from outside."""

    def __init__(self) -> None:
        self.news = 0.0
        """time of the last message of a prefill worker"""
        self.count = 0
        self._last = 0.0
        """when the last untaken prompt was given up"""

    def heard(self, at: float) -> None:
        if at > self.news:
            self.news, self.count = at, 0

    def untaken(self, asked: float, now: float) -> None:
        """A prompt asked for at `asked` is given up, and no worker took it."""
        if asked > self.news and now - asked >= decision.FLOOR:
            self.count, self._last = self.count + 1, now

    def silent(self, now: float) -> bool:
        """Whether to prefill locally: until a worker is heard of, or it is time to try again."""
        return self.count >= UNTAKEN and now - self._last < TRY_AGAIN
