"""What is left of an API key's limits at this frontend. Callers pass the time in monotonic seconds.

Requests and tokens have a bucket each, which holds a minute's worth and fills steadily. A level may be negative. Each
frontend fills its own buckets at the key's rate divided by the number of frontends. So all frontends together give a
key no more than its rate on average (docs/decisions/0036-limits-of-keys.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.edge.response import HttpError

MINUTE = 60.0
KINDS = ("requests", "tokens")
_ALMOST = 1e-6


class LimitReached(HttpError):
    """`limit` is `requests` or `tokens`, as in OpenAI's API. If `retry_after` is 0, waiting does not help."""

    def __init__(self, limit: str, message: str, retry_after: float) -> None:
        super().__init__(429, message, None, retry_after)
        self.limit = limit


class Bucket:
    def __init__(self, limit: int, shares: int, now: float) -> None:
        """A bucket begins full."""
        self.limit = limit
        """capacity; per minute it gets this much, divided by `shares`"""
        self._shares = shares
        self._level = float(limit)
        self._at = now

    @property
    def _rate(self) -> float:
        return self.limit / MINUTE / self._shares

    def level(self, now: float) -> float:
        return min(self.limit, self._level + (now - self._at) * self._rate)

    def take(self, amount: float, now: float) -> None:
        """Subtract an amount; a negative one is added."""
        self._level, self._at = min(self.limit, self.level(now) - amount), now

    def change(self, limit: int, shares: int, now: float) -> None:
        """Change limit and shares; what was used stays used."""
        used = self.limit - self.level(now)
        self.limit, self._shares, self._level, self._at = limit, shares, limit - used, now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds this amount; 0 if it does now."""
        missing = amount - self.level(now)
        return missing / self._rate if missing > _ALMOST else 0.0


class KeyQuota:
    """The limits of one key and their use at this frontend."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.running = 0
        self.used = dict.fromkeys(KINDS, 0.0)
        self.buckets: dict[str, Bucket] = {}
        self._frontends = 1
        self.change(limits, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        for kind, limit in zip(KINDS, (limits.requests_per_minute, limits.tokens_per_minute), strict=True):
            if limit is None:
                self.buckets.pop(kind, None)
            elif kind in self.buckets:
                self.buckets[kind].change(limit, self._frontends, now)
            else:
                self.buckets[kind] = Bucket(limit, self._frontends, now)

    def divide(self, frontends: int, now: float) -> None:
        """Share the limits with this number of frontends from now on."""
        if frontends != self._frontends:
            self._frontends = frontends
            self.change(self.limits, now)

    def begin(self, now: float) -> None:
        """Count a new request. Raises LimitReached."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= math.ceil(most / self._frontends):
            raise LimitReached("requests", f"this API key may have {most} requests at a time", 1.0)
        self.take("requests", 1, now)
        self.running += 1

    def take(self, kind: str, amount: float, now: float) -> None:
        """Take from the bucket of this kind. Raises LimitReached."""
        if (bucket := self.buckets.get(kind)) is None:
            return
        if amount > bucket.limit:
            text = f"this request may need {amount:.0f} {kind}, and this API key has {bucket.limit} a minute"
            raise LimitReached(kind, f"{text}: make it smaller", 0.0)
        if wait := bucket.wait(amount, now):
            text = f"this API key has used its {bucket.limit} {kind} a minute; try again in {in_words(wait)}"
            raise LimitReached(kind, text, wait)
        self.count(kind, amount, now)

    def count(self, kind: str, amount: float, now: float) -> None:
        """Subtract the amount, even if the level falls below zero; a negative amount is added."""
        if kind in self.buckets:
            self.buckets[kind].take(amount, now)
            self.used[kind] += amount

    def state(self, now: float) -> Iterator[tuple[str, int, int, float]]:
        """Yield each kind with its limit, what is left, and the seconds until its bucket is full."""
        for kind, bucket in self.buckets.items():
            left = max(0, math.floor(bucket.level(now) + _ALMOST))
            yield kind, bucket.limit, left, bucket.wait(bucket.limit, now)


class KeyLedger:
    """The quotas of all keys that have limits."""

    def __init__(self) -> None:
        self.frontends: Callable[[], int] = lambda: 1
        """Number of frontends that share the limits, this one included."""
        self._quotas: dict[str, KeyQuota] = {}

    def replace(self, keys: Iterable[ApiKey], now: float) -> None:
        """Replace the limits of all keys; their use so far stays counted."""
        limits = {key.name: key.limits for key in keys if key.limits != KeyLimits()}
        for name in self._quotas.keys() - limits.keys():
            del self._quotas[name]
        for name, limit in limits.items():
            if name not in self._quotas:
                self._quotas[name] = KeyQuota(limit, now)
            elif self._quotas[name].limits != limit:
                self._quotas[name].change(limit, now)

    def quota(self, name: str, now: float) -> KeyQuota | None:
        """Return the key's quota for the current number of frontends; None for a key without limits."""
        if quota := self._quotas.get(name):
            quota.divide(max(1, self.frontends()), now)
        return quota


def in_words(seconds: float) -> str:
    """Format seconds until a limit's reset as OpenAI does: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000 - _ALMOST)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
