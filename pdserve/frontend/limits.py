"""What an API key has left of what it may use, at all frontends together. Pure: the time is told to it, in monotonic
seconds.

Requests and tokens come from a bucket that holds a minute's worth and fills steadily; below zero it counts on, so that
in the mean a key never gets more than its limits say. Each frontend has such buckets for all keys, takes from them what
it admits, and tells the others in a report several times a second; they take the same from theirs. So the buckets of
all frontends are alike but for what was admitted since the last report, and no request waits for another process. A
report has sums since the start, not changes: what one that is lost would have told, the next one tells.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.answer import HttpError

MINUTE = 60.0
KINDS = ("requests", "tokens")
SILENT = 5.0
"""seconds after which a frontend that tells nothing counts as gone, and its requests as over"""
HEARTBEAT = 1.0
"""seconds after which a report has all keys of which something is used, for frontends that have just started"""
MOST_TOLD = 4_000
"""keys in one report: NATS takes a message of a megabyte"""
_ALMOST = 1e-6


class LimitReached(HttpError):
    """`limit` is `requests` or `tokens`, as OpenAI calls them; without `retry_after` it would not help to wait."""

    def __init__(self, limit: str, message: str, retry_after: float) -> None:
        super().__init__(429, message, None, retry_after)
        self.limit = limit


class Bucket:
    def __init__(self, limit: int, now: float) -> None:
        """A bucket begins full."""
        self.limit = limit
        """per minute"""
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        return min(self.limit, self._level + (now - self._at) * self.limit / MINUTE)

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        self._level, self._at = min(self.limit, self.level(now) - amount), now

    def at_most(self, level: float, now: float) -> None:
        self._level, self._at = min(self.level(now), level), now

    def change(self, limit: int, now: float) -> None:
        """Change the limit; what was used stays used."""
        used = self.limit - self.level(now)
        self.limit, self._level, self._at = limit, limit - used, now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until it holds so much; 0 if it does."""
        missing = amount - self.level(now)
        return missing * MINUTE / self.limit if missing > _ALMOST else 0.0


class KeyUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one frontend reports of one key."""

    running: int
    used: dict[str, float]
    """by kind, since the frontend learned of the key's limits"""
    before: dict[str, float]
    """the same in the report before"""
    left: dict[str, float]
    """by kind: the levels of its buckets"""


class UsageReport(msgspec.Struct, frozen=True):
    """From a frontend to all others: the keys whose use changed or goes on. A key that is missing has no request
    there, unless the report is full: then it is as it was last reported."""

    frontend: str
    keys: dict[str, KeyUsage]


class KeyQuota:
    """The limits of one key, and what this process knows of their use."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.running = 0
        self.used = dict.fromkeys(KINDS, 0.0)
        self.told = dict(self.used)
        """in the last report that had this key"""
        self.told_running = 0
        self.buckets: dict[str, Bucket] = {}
        self.change(limits, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        for kind, limit in zip(KINDS, (limits.requests_per_minute, limits.tokens_per_minute), strict=True):
            if limit is None:
                self.buckets.pop(kind, None)
            elif kind in self.buckets:
                self.buckets[kind].change(limit, now)
            else:
                self.buckets[kind] = Bucket(limit, now)

    def begin(self, elsewhere: int, now: float) -> None:
        """Count a request that begins here, while `elsewhere` run at other frontends. Raises LimitReached."""
        most = self.limits.concurrent_requests
        if most is not None and self.running + elsewhere >= most:
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
        """Take it, whatever is left; a negative amount is given back."""
        if kind in self.buckets:
            self.buckets[kind].take(amount, now)
            self.used[kind] += amount

    @property
    def untold(self) -> bool:
        return self.used != self.told or self.running != self.told_running

    def tell(self, now: float) -> KeyUsage:
        before, self.told, self.told_running = self.told, dict(self.used), self.running
        left = {kind: bucket.level(now) for kind, bucket in self.buckets.items()}
        return KeyUsage(self.running, self.told, before, left)

    def full(self, now: float) -> bool:
        return all(bucket.level(now) == bucket.limit for bucket in self.buckets.values())

    def heard(self, usage: KeyUsage, known: Mapping[str, float] | None, now: float) -> None:
        """Take what another frontend has used; `known` is what it had used when it was heard last."""
        before = usage.before if known is None else known
        for kind, bucket in self.buckets.items():
            bucket.take(usage.used.get(kind, 0.0) - before.get(kind, 0.0), now)
            if known is None and kind in usage.left:  # its earlier use is unknown, but not what was left then
                bucket.at_most(usage.left[kind], now)

    def state(self, now: float) -> Iterator[tuple[str, int, int, float]]:
        """Yield each kind with its limit, what is left of it, and the seconds until it is full again."""
        for kind, bucket in self.buckets.items():
            left = max(0, math.floor(bucket.level(now) + _ALMOST))
            yield kind, bucket.limit, left, bucket.wait(bucket.limit, now)


@dataclass
class _Other:
    """Another frontend, as it reported last."""

    heard: float
    keys: Mapping[str, KeyUsage] = field(default_factory=dict)
    used: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """by key, also of those that are idle now"""


class KeyLedger:
    """The quotas of all keys that have limits."""

    def __init__(self, frontend: str = "") -> None:
        self._frontend = frontend
        self._quotas: dict[str, KeyQuota] = {}
        self._others: dict[str, _Other] = {}
        self._told_at = -math.inf
        """monotonic, when all keys were last reported"""

    def replace(self, keys: Iterable[ApiKey], now: float) -> None:
        """Take the limits of these keys from now on. What they have used stays used."""
        limits = {key.name: key.limits for key in keys if key.limits != KeyLimits()}
        for name in self._quotas.keys() - limits.keys():
            del self._quotas[name]
            for other in self._others.values():
                other.used.pop(name, None)
        for name, limit in limits.items():
            if name not in self._quotas:
                self._quotas[name] = KeyQuota(limit, now)
            elif self._quotas[name].limits != limit:
                self._quotas[name].change(limit, now)

    def quota(self, name: str) -> KeyQuota | None:
        return self._quotas.get(name)

    def elsewhere(self, name: str) -> int:
        """Requests of this key that run at other frontends."""
        return sum(other.keys[name].running for other in self._others.values() if name in other.keys)

    def report(self, now: float) -> UsageReport | None:
        """Return what the other frontends do not know yet, and every HEARTBEAT all of it; None if there is nothing.
        What does not fit comes first in the next reports."""
        self._others = {id: other for id, other in self._others.items() if now - other.heard < SILENT}
        whole = now - self._told_at >= HEARTBEAT
        if not whole and not any(quota.untold for quota in self._quotas.values()):
            return None
        if whole:
            self._told_at = now
        keys = (
            (name, quota.tell(now))
            for name, quota in self._quotas.items()
            if quota.running or quota.untold or (whole and not quota.full(now))
        )
        told = dict(islice(keys, MOST_TOLD))
        if len(told) == MOST_TOLD:
            for name in told:
                self._quotas[name] = self._quotas.pop(name)
        return UsageReport(self._frontend, told)

    def heard(self, report: UsageReport, now: float) -> None:
        if report.frontend == self._frontend:
            return
        other = self._others.setdefault(report.frontend, _Other(now))
        full = len(report.keys) >= MOST_TOLD
        other.heard, other.keys = now, {**other.keys, **report.keys} if full else report.keys
        for name, usage in report.keys.items():
            if quota := self._quotas.get(name):
                quota.heard(usage, other.used.get(name), now)
                other.used[name] = usage.used


def in_words(seconds: float) -> str:
    """Write a time as OpenAI does that until a limit is reset: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000 - _ALMOST)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
