"""The registry seam: which processes live, which models are served, and the live settings.

Keys are paths relative to the namespace: `instances/<role>/<id>`, `models/<name>/<instance id>`,
`settings/<key>`, `slots/<host>/<name>`. Values are bytes (JSON by convention). Everything put with `leased=True`
vanishes when this process does.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from pdserve.tasks import Lifetime


@dataclass(frozen=True)
class Change:
    """One key's new value; `value` is None where the key is gone."""

    key: str
    value: bytes | None


class Registry(Lifetime):
    """One process's connection. Entering it takes the lease, leaving it revokes the lease. Entering raises
    RegistryUnavailable when no server answers within a few seconds, unless it is `patient`.

    Outages: while the server is away, `put` and `delete` of leased keys are remembered and carried out when
    it is back (the last one for a key wins), and watches stay open and silent: the last known state stands.
    After an outage the leased keys are there again, under a new lease where the old one has run out, and every watch
    yields what differs, deletions included. Nothing restarts and no caller has to notice, but `connected` tells.
    """

    patient: bool = False
    """Entering waits for a server for as long as it takes, and says so; so does the first read of a RegistryView."""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def put(self, key: str, value: bytes, *, leased: bool = True) -> None:
        """Write a key. Unleased keys (settings) raise RegistryUnavailable during an outage."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a key; absent is fine."""

    @abstractmethod
    async def read(self, prefix: str) -> dict[str, bytes]:
        """All keys below `prefix` as the server has them now; raises RegistryUnavailable during an outage."""

    @abstractmethod
    def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        """Keys below any of these. First one list with all present keys (maybe empty), then lists of changes in the
        server's order. Never ends by itself; a change is never lost, but several changes of one key may be yielded as
        the last one."""


def difference(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[Change]:
    """The changes that turn `old` into `new`, deletions first: what is gone must not be used a moment longer."""
    gone = [Change(key, None) for key in old if key not in new]
    return gone + [Change(key, value) for key, value in new.items() if old.get(key) != value]


def apply(changes: Iterable[Change], state: MutableMapping[str, bytes]) -> None:
    for change in changes:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
