"""Which prefill workers have a prompt's prefix cached, from their reports and from this worker's own prompts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from pdserve.contract.messages import PrefixesChanged
from pdserve.contract.prefix_index import PrefixIndex
from pdserve.contract.prefixes import MAX_REPORTED, block_names, image_keys, report_stride, root_name
from pdserve.contract.records import Instance, Role
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest
from pdserve.engine.base import Engine
from pdserve.queue.base import PrefillQueue
from pdserve.runtime.tasks import isolate_errors
from pdserve.util.errors import ProtocolError


@dataclass(eq=False)
class PrefillPrefixIndex:
    """Leaves out workers of role `both`: of these, the one with the fewest streams should pull a prompt."""

    engine: Engine
    queue: PrefillQueue
    workers: PrefillWorkers
    enabled: bool = True
    """`prefill-by-prefix`."""
    _index: PrefixIndex = field(default_factory=PrefixIndex)
    _own: dict[str, dict[bytes, None]] = field(default_factory=dict)
    """By worker: names of prefixes that it computed for this decode worker, oldest first."""

    async def read(self) -> None:
        """Read the prefill workers' reports, for ever."""
        async for report in self.queue.prefixes():
            with isolate_errors("prefixes of prefill workers"):
                if self.enabled and self.workers.is_known(report.worker):
                    self._index.apply(report.worker, report.changed)

    def cached(self, request: DecodeRequest, workers: Iterable[Instance]) -> dict[str, int]:
        """Return by worker the number of leading prompt tokens that it has cached; workers with none are left out."""
        key = self.engine.prefix_key(request.submit.body) if len(self._index) else None
        if key is None:
            return {}
        found = self._index.cached(request.submit.prompt, *key)
        return {worker.id: found[worker.id] for worker in workers if worker.id in found}

    def computes(self, request: DecodeRequest, worker: str) -> None:
        """Record that a worker computes this prompt: the prompt's prefixes count as cached before the worker reports
        them. If its cache cannot hold all of them, the oldest are forgotten here, because the worker does not
        always report evictions (`prefill/prefix_reports.py`)."""
        if not self.enabled:
            return
        found = next((each for each in self.workers.registered() if each.id == worker), None)
        try:
            key = self.engine.prefix_key(request.submit.body)
        except ProtocolError:
            return
        if found is None or found.role is not Role.PREFILL or key is None:
            return
        size, stride, prompt = found.block_size or 1, report_stride(found.kv_blocks), request.submit.prompt
        shown = image_keys(key.images, size)
        names = block_names(prompt, size, root_name(key.salt, key.adapter), shown=shown)
        new = [name for depth, name in enumerate(names, 1) if depth % stride == 0]
        own = self._own.setdefault(worker, {})
        for name in new:
            own.pop(name, None)
            own[name] = None
        most = min(MAX_REPORTED, found.kv_blocks // stride)
        old = list(islice(own, max(0, len(own) - most)))
        for name in old:
            del own[name]
        self._index.apply(worker, PrefixesChanged(size, stride, new, old))

    def forget_gone(self) -> None:
        """Forget workers that are no longer registered."""
        for worker in self._index.workers() - {peer.id for peer in self.workers.peers()}:
            self._index.forget(worker)
            self._own.pop(worker, None)
