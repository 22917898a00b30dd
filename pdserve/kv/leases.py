"""Which prefills' KV blocks a prefill engine holds for decode engines.

A read does not check what it reads, and a decode engine cannot judge the KV lease, because its clock may have stood
still (a paused VM). So after each read the decode engine asks the prefill engine whether it held the blocks until now
(`side_channel.py`; docs/decisions/0095-the-owner-judges-the-lease.md)."""

from pdserve.util.lru import LruDict

REMEMBERED = 10_000
"""Number of read prefills to remember; decode engines ask milliseconds after the read."""


class Leases:
    """The scheduler updates this before it frees blocks; the side channel's thread reads it. Keys: prefill ids."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._read: LruDict[None] = LruDict(REMEMBERED)
        """Prefills whose blocks were freed because all ranks had read them."""

    def begin(self, prefill: str) -> None:
        """Record that the prefill starts. A preemption may change its blocks; then its handle says so."""
        self._held.add(prefill)

    def end(self, prefill: str, *, read: bool) -> None:
        """Record that its blocks are about to be freed: they were `read`, the lease ran out, or the prefill was
        aborted. A second call is ignored."""
        if prefill in self._held:
            if read:
                self._read[prefill] = None
            self._held.discard(prefill)

    def is_held(self, prefill: str) -> bool:
        """Whether every read of its blocks that has ended by now found its KV."""
        return prefill in self._held or prefill in self._read
