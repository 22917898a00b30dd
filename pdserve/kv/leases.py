"""The leases of a prefill engine: of which prefills it holds the KV.

A read does not check what it reads, and a decode engine cannot judge the lease: its clock may have stood still (a
paused VM). So after each read, and before the KV is used, the decode engine asks the prefill engine whether it held the
blocks until now (`side_channel.py`; docs/decisions/0095-the-owner-judges-the-lease.md)."""

from pdserve.util.lru import LruDict

REMEMBERED = 10_000
"""prefills whose KV was read; a question comes milliseconds after the read"""


class Leases:
    """By id of the prefill. Written by the scheduler before blocks change hands, read by the side channel's thread."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._read: LruDict[None] = LruDict(REMEMBERED)
        """freed because all readers reported the end of their reads"""

    def begin(self, prefill: str) -> None:
        """The engine has this prefill. Its blocks may change only where it is preempted; its handle says so."""
        self._held.add(prefill)

    def end(self, prefill: str, *, read: bool) -> None:
        """Its blocks are about to be freed: after they were `read`, or because the lease ran out or the prefill was
        aborted. A second end is ignored."""
        if prefill in self._held:
            if read:
                self._read[prefill] = None
            self._held.discard(prefill)

    def held(self, prefill: str) -> bool:
        """Whether all reads of its blocks that have ended by now found its KV."""
        return prefill in self._held or prefill in self._read
