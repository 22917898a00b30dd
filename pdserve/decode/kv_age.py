"""An upper bound of the age of an answer's KV, by this host's clock alone. Pure: times come from outside.

KV that is read after its lease may belong to another prompt: wrong tokens, without any error. The prefill worker
sends the age with the answer, but the answer may be delayed: in the buffer of a connection that hung, or in this
process while it hung itself. Two bounds hold whatever the delay:

- The KV was computed after it was asked for.
- An answer with the token of a `PrefillConfirm` was sent after that message: its delay is at most the time since.
"""

import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from pdserve.messages import PrefillDone

DOUBT = 1 / 6
"""share of a lease (5 s of 30) by which KV may count as older than it is before its age is worth a question"""
ASK_AGAIN = 1.0
"""seconds after which a repeated answer makes the decode worker ask for a confirmation again"""


@dataclass
class KvAge:
    asked: float
    """when the KV was asked for"""
    token: str = ""
    confirm_asked: float = 0.0

    def seconds(self, answer: PrefillDone, now: float) -> float:
        """The KV's greatest possible age."""
        bound = now - self.asked
        if self.token and answer.token == self.token:
            bound = min(bound, now - self.confirm_asked + max(0.0, answer.age))
        return bound

    def doubtful(self, answer: PrefillDone, now: float) -> bool:
        """Whether the KV may be so old that a confirmation is worth its round trip."""
        doubt = DOUBT * answer.handle.lease
        return answer.token != self.token if self.token else self.seconds(answer, now) > doubt

    def confirm(self, now: float) -> str | None:
        """A new token to ask for a confirmation with; None if the last question is recent."""
        if self.token and now < self.confirm_asked + ASK_AGAIN:
            return None
        self.token, self.confirm_asked = secrets.token_hex(4), now
        return self.token

    def dated(self, answer: PrefillDone, now: float) -> PrefillDone:
        """Return the answer with the KV's age by this host's clock."""
        computed_at = now - self.seconds(answer, now)
        return replace(answer, handle=replace(answer.handle, computed_at=computed_at))
