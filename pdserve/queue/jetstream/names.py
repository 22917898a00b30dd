"""Names on NATS: subjects, stream, consumer, bucket. Different models never share a name, whatever they are
called."""

import hashlib
from dataclasses import dataclass

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_LONGEST = 120
"""stream names become folder names"""


def token(text: str) -> str:
    """`text` as one token of a subject, reversible in principle: all but letters, digits, `_` and `-` is
    written as `=` and two hex digits. What gets too long ends in a digest instead."""
    plain = "".join(
        one if one in _PLAIN else "".join(f"={byte:02X}" for byte in one.encode()) for one in text
    )
    if len(plain) <= _LONGEST:
        return plain or "="
    return f"{plain[: _LONGEST - 34]}=={hashlib.sha256(text.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class Names:
    namespace: str
    model: str
    fingerprint: str = ""
    """of what the workers have loaded; those of different ones share nothing"""

    @property
    def root(self) -> str:
        return ".".join(["pdserve", token(self.namespace), token(self.model), token(self.fingerprint)])

    @property
    def stream(self) -> str:
        return f"{self.streams}{token(self.fingerprint)}"

    @property
    def streams(self) -> str:
        """How the names of all streams of the model begin."""
        return f"pdserve+{token(self.namespace)}+{token(self.model)}+"

    @property
    def requests(self) -> str:
        return f"{self.root}.prefill"

    @property
    def state(self) -> str:
        return f"{self.root}.state"

    @property
    def notices(self) -> str:
        return f"{self.root}.notices"

    def answers(self, instance: str) -> str:
        return f"{self.root}.answers.{token(instance)}"

    def warm_ups(self, instance: str) -> str:
        return f"{self.root}.warm-ups.{token(instance)}"


CONSUMER = "prefill"
"""the one durable consumer of a stream, shared by all prefill workers"""


def bucket(namespace: str) -> str:
    """Buckets may hold only letters, digits, `_` and `-`."""
    return "pdserve-" + token(namespace).replace("_", "__").replace("=", "_x")
