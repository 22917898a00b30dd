"""Prefix index: which workers have which prefixes cached, from their reports (`messages.PrefixesChanged`). Frontends
that route by `kv` index the decode workers; decode workers index the prefill workers."""

from collections.abc import Sequence

from pdserve.contract.messages import PrefixesChanged
from pdserve.contract.prefixes import PromptImage, block_names, image_keys, root_name


class PrefixIndex:
    """Holds names (hashes) of prefixes (`contract/prefixes.py`), not tokens. It may lag behind the workers' caches,
    which at worst makes a request slower."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, int], dict[bytes, tuple[str, ...]]] = {}
        """by block size and stride, then by name: the workers with that prefix"""
        self._reported: dict[str, tuple[tuple[int, int], set[bytes]]] = {}
        """by worker: block size and stride, and the names in its reports"""

    def __len__(self) -> int:
        """Number of names, counted for each worker."""
        return sum(len(names) for _, names in self._reported.values())

    def workers(self) -> set[str]:
        return set(self._reported)

    def apply(self, worker: str, change: PrefixesChanged) -> None:
        if change.whole or worker not in self._reported:
            self.forget(worker)
            self._reported[worker] = (change.block_size, change.stride), set()
        shape, reported = self._reported[worker]
        holders, new = self._holders.setdefault(shape, {}), (worker,)
        for name in change.stored:
            if name not in reported:
                reported.add(name)
                holders[name] = holders[name] + new if name in holders else new
        self._remove(worker, change.removed)

    def forget(self, worker: str) -> None:
        """Remove a worker with its names."""
        if worker in self._reported:
            self._remove(worker, list(self._reported[worker][1]))
            del self._reported[worker]

    def _remove(self, worker: str, names: Sequence[bytes]) -> None:
        shape, reported = self._reported[worker]
        holders = self._holders.get(shape, {})
        for name in names:
            if name in reported:
                reported.discard(name)
                left = tuple(other for other in holders[name] if other != worker)
                if left:
                    holders[name] = left
                else:
                    del holders[name]
        if not holders:
            self._holders.pop(shape, None)

    def cached(
        self, prompt: Sequence[int], salt: str | None, adapter: int = 0, images: Sequence[PromptImage] = ()
    ) -> dict[str, int]:
        """Return by worker the number of leading prompt tokens that it has cached; workers with none are left out.
        Walks the prompt only as far as any worker has it."""
        found: dict[str, int] = {}
        for (block_size, stride), holders in self._holders.items():
            levels: list[tuple[str, ...]] = []
            first, end, shown = root_name(salt, adapter), len(prompt) - 1, image_keys(images, block_size)
            for block, name in enumerate(block_names(prompt, block_size, first, end, shown), 1):
                if block % stride == 0:
                    if name not in holders:
                        break
                    levels.append(holders[name])
            count = 0
            # A worker with a block has all blocks before it. So the list of holders only grows from the longest prefix
            # to the shortest, and a list of equal length has the same workers.
            for depth in range(len(levels), 0, -1):
                if len(levels[depth - 1]) > count:
                    count = len(levels[depth - 1])
                    for worker in levels[depth - 1]:
                        found.setdefault(worker, depth * stride * block_size)
        return found
