"""Prefix index: which worker has which prefixes cached. Frontends that route by `kv` index decode workers. Decode
workers index prefill workers."""

from collections.abc import Iterable, Sequence
from itertools import islice

from pdserve.contract.messages import PrefixesChanged
from pdserve.contract.prefixes import MAX_REPORTED, PromptNames, report_stride


class PrefixIndex:
    """Prefixes by their names (`contract/prefixes.py`). It may lag behind the workers' caches, which at worst makes a
    request slower."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, int], dict[bytes, tuple[str, ...]]] = {}
        """by block size and stride (blocks per name), then by name: the workers with that prefix"""
        self._reported: dict[str, tuple[tuple[int, int], set[bytes]]] = {}
        """by worker: block size and stride, and the names that it reported or that `expect` added"""
        self._expected: dict[str, dict[bytes, None]] = {}
        """by worker: names that `expect` added and that the worker has not reported since, oldest first"""

    def __len__(self) -> int:
        """Number of names; a name counts once for each worker that has it."""
        return sum(len(names) for _, names in self._reported.values())

    def workers(self) -> set[str]:
        return set(self._reported)

    def apply(self, worker: str, change: PrefixesChanged) -> None:
        if change.whole or worker not in self._reported:
            self._forget_reported(worker)
            self._reported[worker] = (change.block_size, change.stride), set()
        expected = self._expected.get(worker, {})
        for name in (*change.stored, *change.removed):
            expected.pop(name, None)
        self._add(worker, change.stored)
        self._remove(worker, change.removed)

    def _add(self, worker: str, names: Iterable[bytes]) -> None:
        shape, reported = self._reported[worker]
        holders, new = self._holders.setdefault(shape, {}), (worker,)
        for name in names:
            if name not in reported:
                reported.add(name)
                holders[name] = holders[name] + new if name in holders else new

    def expect(self, worker: str, prompt: PromptNames, block_size: int, kv_blocks: int) -> None:
        """Count a prompt's prefixes as cached at the worker that will compute it: prompts with a common prefix often
        come together. The worker may never report some. So the index forgets the oldest expected names if the worker's
        cache of `kv_blocks` blocks cannot hold all."""
        stride = report_stride(kv_blocks)
        shape, reported = self._reported.setdefault(worker, ((block_size, stride), set()))
        expected = self._expected.setdefault(worker, {})
        if shape != (block_size, stride):
            return
        names = [*islice(prompt.of(block_size), stride - 1, None, stride)]
        for name in reversed(names):  # a cache drops the end of a prompt before its beginning
            if name in expected or name not in reported:
                expected.pop(name, None)
                expected[name] = None
        self._add(worker, names)
        old = [*islice(expected, max(0, len(expected) - min(MAX_REPORTED, kv_blocks // stride)))]
        for name in old:
            del expected[name]
        self._remove(worker, old)

    def forget(self, worker: str) -> None:
        """Remove a worker with its names."""
        self._expected.pop(worker, None)
        self._forget_reported(worker)

    def _forget_reported(self, worker: str) -> None:
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

    def cached(self, prompt: PromptNames) -> dict[str, int]:
        """Return the number of leading prompt tokens that each worker has cached, without workers that have none."""
        found: dict[str, int] = {}
        for (block_size, stride), holders in self._holders.items():
            levels: list[tuple[str, ...]] = []
            for block, name in enumerate(prompt.reusable(block_size), 1):
                if block % stride == 0:
                    if name not in holders:
                        break
                    levels.append(holders[name])
            count = 0
            # A worker with a block has all blocks before it. So a shorter prefix has the same workers or more.
            for depth in range(len(levels), 0, -1):
                if len(levels[depth - 1]) > count:
                    count = len(levels[depth - 1])
                    for worker in levels[depth - 1]:
                        found.setdefault(worker, depth * stride * block_size)
        return found
