"""When a process that ended is started again, and when not: pure decisions.

A graph is given up only where that can tell the operator something that is true from the first minute on: the
configuration is wrong, or no process of this role has ever become ready. Later, one process that does not come back is
no reason to stop the others: it is tried again for ever, at the back-off's ceiling.
"""

from collections.abc import Sequence
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
    """so many since it was last ready, and it does not start"""
    kills: int = 20
    """so many starts ended from outside count like failed ones: the kernel has no memory for it, say"""


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


def decide(
    lives: Sequence[Life], policy: Policy, *, was_ready: bool = False, role_was_ready: bool = False
) -> Restart | GiveUp:
    """What to do now that the last of these lives (oldest first, at least one) has ended without having been
    asked. `was_ready`: this process was, ever; `role_was_ready`: any of its role was."""
    if lives[-1].end.code == CONFIG_ERROR and not was_ready:
        return GiveUp("its configuration is wrong")
    if not role_was_ready:
        failed = failed_starts(lives)
        if failed >= policy.failed_starts:
            return GiveUp(f"it failed to start {_times(failed)} in a row")
        if len(lives) >= policy.kills:
            return GiveUp(f"it was ended {_times(len(lives))} while it started")
    return Restart(min(policy.ceiling, policy.first * 2 ** max(0, _row(lives, policy) - 1)))


def failed_starts(lives: Sequence[Life]) -> int:
    """Since it was last ready. One that was ended from outside did not fail."""
    count = 0
    for life in reversed(lives):
        if life.ready:
            break
        count += not life.end.from_outside
    return count


def _row(lives: Sequence[Life], policy: Policy) -> int:
    """Failures in a row: back-off is for a process that fails by itself, not for one that is killed."""
    count = 0
    for life in reversed(lives):
        if life.seconds >= policy.healthy:
            break
        count += not life.end.from_outside
    return count


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
