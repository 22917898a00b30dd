"""Which decode workers have which prefixes cached, as they report it (`messages.PrefixesChanged`)."""

from collections.abc import Collection, Sequence

from pdserve.contract.messages import PrefixesChanged
from pdserve.contract.prefixes import PromptImage, block_names, image_keys, root_name


class PrefixIndex:
    """Holds names of prefixes (`contract/prefixes.py`), no tokens. It is as old as the last reports: a request that it
    sends to the wrong worker is only slower."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, int], dict[bytes, tuple[str, ...]]] = {}
        """by block size and stride (equal workers have equal ones), by name: the workers that have that prefix"""
        self._told: dict[str, tuple[tuple[int, int], set[bytes]]] = {}
        """by worker: its block size and stride, and the names that it reported"""

    def __len__(self) -> int:
        """The names of all workers, counted for each."""
        return sum(len(told) for _, told in self._told.values())

    def told(self, worker: str) -> Collection[bytes]:
        return self._told[worker][1] if worker in self._told else ()

    def apply(self, worker: str, change: PrefixesChanged) -> None:
        if change.whole or worker not in self._told:
            self.forget(worker)
            self._told[worker] = (change.block_size, change.stride), set()
        shape, told = self._told[worker]
        holders, alone = self._holders.setdefault(shape, {}), (worker,)
        for name in change.stored:
            if name not in told:
                told.add(name)
                holders[name] = holders[name] + alone if name in holders else alone
        self._remove(worker, change.removed)

    def forget(self, worker: str) -> None:
        """Remove a worker that is gone."""
        if worker in self._told:
            self._remove(worker, list(self._told[worker][1]))
            del self._told[worker]

    def _remove(self, worker: str, gone: Sequence[bytes]) -> None:
        shape, told = self._told[worker]
        holders = self._holders.get(shape, {})
        for name in gone:
            if name in told:
                told.discard(name)
                left = tuple(other for other in holders[name] if other != worker)
                if left:
                    holders[name] = left
                else:
                    del holders[name]
        if not holders:
            self._holders.pop(shape, None)

    def cached(
        self, prompt: Sequence[int], salt: str | None, adapter: int = 0, pictures: Sequence[PromptImage] = ()
    ) -> dict[str, int]:
        """By worker: how many leading tokens of the prompt it has; workers without any are left out. Walks the prompt
        only as far as any worker has it."""
        found: dict[str, int] = {}
        for (block_size, stride), holders in self._holders.items():
            levels: list[tuple[str, ...]] = []
            first, end, shown = root_name(salt, adapter), len(prompt) - 1, image_keys(pictures, block_size)
            for block, name in enumerate(block_names(prompt, block_size, first, end, shown), 1):
                if block % stride == 0:
                    if name not in holders:
                        break
                    levels.append(holders[name])
            here = 0
            # a worker that has a block has those before it: new workers appear only where their number grows
            for depth in range(len(levels), 0, -1):
                if len(levels[depth - 1]) > here:
                    here = len(levels[depth - 1])
                    for worker in levels[depth - 1]:
                        found.setdefault(worker, depth * stride * block_size)
        return found
