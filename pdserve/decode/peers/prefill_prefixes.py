"""Which prefill workers have a prompt's prefix cached, from their reports and from this worker's own prompts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.contract.prefix_index import PrefixIndex
from pdserve.contract.records import Instance, Role
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest
from pdserve.queue.base import PrefillQueue
from pdserve.runtime.tasks import isolate_errors


@dataclass(eq=False)
class PrefillPrefixIndex:
    """Leaves out workers of role `both`, because a prompt is meant for the one that decodes the fewest sequences."""

    queue: PrefillQueue
    workers: PrefillWorkers
    enabled: bool = True
    """`prefill-by-prefix`."""
    _index: PrefixIndex = field(default_factory=PrefixIndex)

    async def read(self) -> None:
        """Read the prefill workers' reports, for ever."""
        async for report in self.queue.prefixes():
            with isolate_errors("prefixes of prefill workers"):
                if self.enabled and self.workers.is_known(report.worker):
                    self._index.apply(report.worker, report.changed)

    def cached(self, request: DecodeRequest, workers: Iterable[Instance]) -> dict[str, int]:
        """Return by worker how many leading prompt tokens are in its cache. Workers without any are left out."""
        if request.names is None or not len(self._index):
            return {}
        found = self._index.cached(request.names)
        return {worker.id: found[worker.id] for worker in workers if worker.id in found}

    def computes(self, request: DecodeRequest, worker: str) -> None:
        """Expect this prompt's prefix in the worker's cache. Workers report only while prompts find prefixes there
        (`prefill/prefix_reports.py`)."""
        found = next((each for each in self.workers.registered() if each.id == worker), None)
        if self.enabled and request.names and found is not None and found.role is Role.PREFILL:
            self._index.expect(worker, request.names, found.block_size or 1, found.kv_blocks)

    def forget_gone(self) -> None:
        for worker in self._index.workers() - {peer.id for peer in self.workers.peers()}:
            self._index.forget(worker)
