"""When a process that ended is started again, and when not: pure decisions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.supervisor.process import CONFIG_ERROR, Ended


@dataclass(frozen=True)
class Policy:
    first: float = 1.0
    """seconds before the first restart; doubled with each further one"""
    ceiling: float = 30.0
    healthy: float = 60.0
    """a life of so many seconds ends the row of failures"""
    failed_starts: int = 3
    """so many in a row, none of which became ready, and it never will"""
    crashes: int = 20
    """so many within the window, and something is badly wrong"""
    window: float = 600.0


@dataclass(frozen=True)
class Life:
    """One start of a process, to its end; times in seconds of one clock."""

    started: float
    ended: float
    ready: bool
    end: Ended

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Restart:
    delay: float


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(lives: Sequence[Life], policy: Policy) -> Restart | GiveUp:
    """What to do now that the last of these lives (oldest first, at least one) has ended without having been
    asked."""
    last = lives[-1]
    if last.end.code == CONFIG_ERROR and not last.ready:
        return GiveUp("its configuration is wrong")
    starts = _trailing(not life.ready for life in reversed(lives))
    if starts >= policy.failed_starts:
        return GiveUp(f"it failed to start {_times(starts)} in a row")
    crashes = sum(last.ended - life.ended <= policy.window for life in lives)
    if crashes >= policy.crashes:
        return GiveUp(f"it ended {_times(crashes)} within {policy.window:g} s")
    row = _trailing(life.seconds < policy.healthy for life in reversed(lives))
    return Restart(min(policy.ceiling, policy.first * 2 ** max(0, row - 1)))


def _trailing(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
