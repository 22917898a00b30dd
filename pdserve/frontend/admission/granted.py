"""The sequences that have places at the workers, and which of them have to pause for others."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

KEPT = 4
"""one place of so many is kept from sequences that cannot pause"""


class OfClient(Protocol):
    unread: bool
    """its client reads nothing"""


class Pausable(Protocol):
    """What has a place: a `SequencePermit`."""

    fixed: bool
    """it can never pause"""
    granted: bool

    @property
    def admission(self) -> OfClient: ...


P = TypeVar("P", bound=Pausable)


class GrantedPermits(Generic[P]):
    def __init__(self, runs: Callable[[P], int]) -> None:
        """`runs`: how many sequences a permit's client runs."""
        self._runs = runs
        self._permits: dict[P, None] = {}
        """the youngest last"""
        self._fixed = 0
        """of these, those that cannot pause"""

    def __len__(self) -> int:
        return len(self._permits)

    def __iter__(self) -> Iterator[P]:
        return iter(self._permits)

    def add(self, permit: P) -> None:
        permit.granted = True
        self._permits[permit] = None
        self._fixed += permit.fixed

    def remove(self, permit: P) -> None:
        permit.granted = False
        del self._permits[permit]
        self._fixed -= permit.fixed

    @property
    def any_unread(self) -> bool:
        return any(permit.admission.unread for permit in self._permits)

    def leave_room(self, places: int) -> bool:
        """Whether one more sequence that cannot pause leaves the places that are kept."""
        return self._fixed < places - max(1, places // KEPT)

    def to_pause(self, permits: Iterable[P]) -> list[P]:
        """Those that can pause, in the order in which they have to: what is not read, then of the client that runs the
        most, the youngest first. Of no client the only one that is read."""
        age = {permit: age for age, permit in enumerate(self._permits)}
        return sorted(
            (
                permit
                for permit in permits
                if permit in age and not permit.fixed and (permit.admission.unread or self._runs(permit) > 1)
            ),
            key=lambda permit: (permit.admission.unread, self._runs(permit), age[permit]),
            reverse=True,
        )
