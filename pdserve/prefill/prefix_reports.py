"""Reports a prefill worker's prefix cache to decode workers, which send prompts to the worker with their prefix.

Nothing is reported while no prompt finds a prefix here, so that unrelated prompts cost no messages."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.contract.messages import PrefillPrefixes, PrefixesChanged
from pdserve.engine.base import Engine
from pdserve.prefill.answer_sender import unless_away
from pdserve.queue.base import PrefillQueue
from pdserve.runtime.tasks import isolate_errors
from pdserve.util.ticks import tick

DECODE_WORKERS = "decode workers"
"""Name under which all decode workers together follow the prefix cache."""
INTERVAL = 0.25
"""Seconds between two reports, with few decode workers."""
MAX_DELIVERIES = 100
"""Maximum of deliveries per second of one worker's reports, each of which goes to all decode workers."""
IDLE_INTERVAL = 1.0
"""Seconds between two checks for prefix hits while nothing is reported."""
WHOLE_INTERVAL = 30.0
"""Seconds after which a report has the whole cache, because reports get lost."""
SHARED_FOR = 60.0
"""Seconds after the last prefix hit for which the cache is reported."""


@dataclass(eq=False)
class PrefixReports:
    instance: str
    engine: Engine
    queue: PrefillQueue
    readers: Callable[[], set[str]]
    """Ids of the decode workers that may read this worker's KV."""
    last_hit: float = -SHARED_FOR
    """Monotonic time of the last prompt that found a prefix in the cache."""

    async def report(self) -> None:
        """Report changes of the cache, or the whole cache if a decode worker is new, or `WHOLE_INTERVAL` has passed."""
        known: set[str] = set()
        whole_at = 0.0
        while True:
            if time.monotonic() > self.last_hit + SHARED_FOR:
                await tick(IDLE_INTERVAL)
            readers = self.readers()
            await asyncio.sleep(max(INTERVAL, len(readers) / MAX_DELIVERIES))
            now, prefixes = time.monotonic(), self.engine.prefixes
            if now > self.last_hit + SHARED_FOR or not readers:
                prefixes.follow(DECODE_WORKERS, False)
                known = set()
                continue
            stored, removed = prefixes.changes(DECODE_WORKERS)
            is_new = prefixes.follow(DECODE_WORKERS)
            whole = is_new or bool(readers - known) or now > whole_at + WHOLE_INTERVAL
            if whole:
                stored, removed, whole_at = prefixes.known(), [], now
            known = readers
            if stored or removed or whole:
                changed = PrefixesChanged(prefixes.block_size, prefixes.stride, stored, removed, whole)
                with isolate_errors("prefix reports"):
                    await unless_away(self.queue.report_prefixes(PrefillPrefixes(self.instance, changed)))
