"""The registry's contract: live processes, served models and live settings as keys with leases.

Keys are paths relative to the namespace (`keys.py`). Values are bytes, by convention JSON. A key that was put with
`leased=True` is deleted when its process ends.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from pdserve.runtime.tasks import Lifetime


@dataclass(frozen=True)
class Change:
    """A key's new value; None: the key was deleted."""

    key: str
    value: bytes | None


class Registry(Lifetime):
    """A process's connection to the registry. Entering takes a lease, leaving revokes it. Entering raises
    RegistryUnavailable if no server answers within a few seconds, unless the registry is `patient`.

    During an outage, watches are silent, and `put` and `delete` of leased keys take effect when the server is back.
    Then the leased keys exist again, and every watch yields what has changed.

    A leased key exists until its process deletes it or ends. It is written again if another process deletes it,
    overwrites it, or revokes its lease.
    """

    patient: bool = False
    """whether entering, and the first read of a RegistryView, waits for a server without limit"""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """Why a reachable server accepts no new process; empty if it accepts them, or is unreachable."""
        return ""

    @abstractmethod
    async def put(self, key: str, value: bytes, *, leased: bool = True, holding: str = "") -> None:
        """Write a key. For a leased key, this is repeated until the server accepts it. For an unleased key, it raises
        RegistryUnavailable if the server does not accept it at once, or if this process has lost the key `holding`,
        which it created."""

    @abstractmethod
    async def create(self, key: str, value: bytes) -> bool:
        """Atomically create a leased key; return False if it exists. Unlike a key of `put`, it is not written again if
        it is lost, such as when the lease expires during an outage. Raises RegistryUnavailable if the server does not
        accept it at once; the key then does not exist, or not for long."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Delete a key if it exists; a leased key only if it is still this process's."""

    @abstractmethod
    async def read(self, prefix: str) -> dict[str, bytes]:
        """Return the server's present keys below `prefix`. Raises RegistryUnavailable during an outage."""

    @abstractmethod
    def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        """Yield the changes of the keys below any of these prefixes: first a list of all present keys, which may be
        empty, then lists of changes in the server's order. Never ends. Several changes of a key may be merged into the
        last."""


def difference(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[Change]:
    """Return the changes from `old` to `new`, deletions first, because deleted entries must not be used any longer."""
    gone = [Change(key, None) for key in old if key not in new]
    return gone + [Change(key, value) for key, value in new.items() if old.get(key) != value]


def apply_changes(changes: Iterable[Change], state: MutableMapping[str, bytes]) -> None:
    for change in changes:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
