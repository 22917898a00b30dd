"""The answers whose KV this prefill worker still keeps. It says them with the age that the KV has at that moment."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pdserve.messages import PrefillDone

TELL_AGAIN = 2.0
"""seconds after which an answer whose KV nobody read is said again; a read takes milliseconds"""
FORGET = 2.0
"""leases after which KV is taken for freed though the engine never said so"""


@dataclass
class _Kept:
    decode: str
    answer: PrefillDone
    since: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)


class Held:
    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, decode: str, answer: PrefillDone) -> None:
        self._kept[answer.handle.request_id] = _Kept(decode, answer)
        self._empty.clear()

    def get(self, held: str) -> PrefillDone | None:
        """By the handle's `request_id`; None where that KV is kept no longer."""
        kept = self._kept.get(held)
        return None if kept is None else kept.answer

    def release(self, request_id: str) -> None:
        """By the handle's `request_id`; unknown ones are ignored."""
        self._kept.pop(request_id, None)
        if not self._kept:
            self._empty.set()

    def untaken(self) -> Iterator[tuple[str, PrefillDone]]:
        """Decode worker and answer, where it is time to say it again; a caller says each one that it is given."""
        now = time.monotonic()
        for request_id, one in list(self._kept.items()):
            if now > one.since + FORGET * one.answer.handle.lease:
                self.release(request_id)
            elif now >= one.told + TELL_AGAIN:
                one.told = now
                yield one.decode, one.answer

    async def empty(self) -> None:
        await self._empty.wait()


def aged(answer: PrefillDone, token: str = "") -> PrefillDone:
    """As it is sent now: its time of computation, which means something on this host only, as an age."""
    age = time.monotonic() - answer.handle.computed_at
    unknown = msgspec.structs.replace(answer.handle, computed_at=-math.inf)
    return msgspec.structs.replace(answer, handle=unknown, age=age, token=token)
