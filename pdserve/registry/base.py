"""The registry seam: the live processes, the served models, and the live settings.

Keys are paths relative to the namespace (`keys.py`). Values are bytes (JSON by convention). A key that was put with
`leased=True` vanishes when this process does.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from pdserve.runtime.tasks import Lifetime


@dataclass(frozen=True)
class Change:
    """A key's new value; None: the key is gone."""

    key: str
    value: bytes | None


class Registry(Lifetime):
    """One process's connection. Entering takes a lease, leaving revokes it. Entering raises RegistryUnavailable if no
    server answers within a few seconds, unless the registry is `patient`.

    Outages: while the server is away, `put` and `delete` of leased keys are remembered and carried out when it is back
    (the last one for a key wins), and watches stay open and silent: the last known state stands. After an outage the
    leased keys are there again, under a new lease if the old one has run out, and every watch yields what differs,
    deletions included. Nothing restarts; `connected` shows the outage.

    A leased key that was put is there as long as its process has not deleted it: if another process deletes or
    overwrites it, or its lease, it is written again.
    """

    patient: bool = False
    """whether entering, and the first read of a RegistryView, waits for a server for as long as it takes"""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """What the server answers, where it answers and serves no new process all the same; else empty."""
        return ""

    @abstractmethod
    async def put(self, key: str, value: bytes, *, leased: bool = True, holding: str = "") -> None:
        """Write a key. For an unleased key (a setting) raises RegistryUnavailable during an outage, if the server
        refuses the value, and if this process does not have the key `holding`, which it created, at that moment; a
        leased one is written again until it is taken."""

    @abstractmethod
    async def create(self, key: str, value: bytes) -> bool:
        """Write a leased key unless it is there, in one step: of several calls, of any process, one is returned True.
        It is this process's until it deletes it, or the lease has run out during an outage: it is not written again.
        Raises RegistryUnavailable during an outage, and if the server refuses the value; then it is not there, or not
        for long."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a key if it is there; one of this process's only if no other process has it by now."""

    @abstractmethod
    async def read(self, prefix: str) -> dict[str, bytes]:
        """Return all keys below `prefix` as the server has them now. Raises RegistryUnavailable during an outage."""

    @abstractmethod
    def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        """Yield the changes of the keys below any of these: first one list with all present keys (maybe empty), then
        lists of changes in the server's order. Never ends by itself. No change is lost, but several changes of one key
        may be yielded as the last of them."""


def difference(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[Change]:
    """Return the changes that turn `old` into `new`, deletions first: what is gone must not be used any longer."""
    gone = [Change(key, None) for key in old if key not in new]
    return gone + [Change(key, value) for key, value in new.items() if old.get(key) != value]


def apply_changes(changes: Iterable[Change], state: MutableMapping[str, bytes]) -> None:
    for change in changes:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
