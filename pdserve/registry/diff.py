"""What a watch yields after it has read everything anew."""

from collections.abc import Iterable, Mapping, MutableMapping

from pdserve.registry.base import Change


def difference(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[Change]:
    """The changes that turn `old` into `new`, deletions first: what is gone must not be used a moment
    longer."""
    gone = [Change(key, None) for key in old if key not in new]
    return gone + [Change(key, value) for key, value in new.items() if old.get(key) != value]


def apply(changes: Iterable[Change], state: MutableMapping[str, bytes]) -> None:
    for change in changes:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
