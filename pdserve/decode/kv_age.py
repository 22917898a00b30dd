"""How old the KV of an answer is at most, by this host's own clock and nothing else. Pure: times come from outside.

KV that is read after its lease may be another prompt's: wrong tokens, and nothing shows it. What the prefill worker
says of its age is true when it says so, but an answer may have been on its way for long: in the buffer of a connection
that hung, or in that of this process while it hung itself. Two bounds hold whatever happened on the way:

- The KV was computed after it was asked for.
- An answer that carries the token of a `PrefillConfirm` was said after that was sent: it has been on its way for no
  longer than that was ago.
"""

import secrets
from dataclasses import dataclass

from pdserve.messages import PrefillDone

DOUBT = 1 / 6
"""share of a lease that is given away rather than asking for confirmation: 5 s"""
ASK_AGAIN = 1.0
"""seconds after which a confirmation is asked for anew, when the answer is said again"""


@dataclass
class KvAge:
    asked: float
    """when the KV was asked for"""
    token: str = ""
    confirm_asked: float = 0.0

    def seconds(self, answer: PrefillDone, now: float) -> float:
        """Since its KV was computed, at most."""
        bound = now - self.asked
        if self.token and answer.token == self.token:
            bound = min(bound, now - self.confirm_asked + max(0.0, answer.age))
        return bound

    def doubtful(self, answer: PrefillDone, now: float) -> bool:
        """Whether a confirmation might show that it is younger."""
        if self.token:
            return answer.token != self.token
        return self.seconds(answer, now) > DOUBT * answer.handle.lease

    def confirm(self, now: float) -> str | None:
        """The token to ask for a confirmation with; None where that was done just now."""
        if self.token and now < self.confirm_asked + ASK_AGAIN:
            return None
        self.token, self.confirm_asked = secrets.token_hex(4), now
        return self.token
