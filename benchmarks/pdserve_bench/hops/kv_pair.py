"""A lender and a borrower of KV (`kv_ends.py`), as the benchmark that started them sees the two."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from pdserve.kv.pool import PoolShape
from pdserve_bench.hops import ends
from pdserve_bench.hops.kv_ends import Connect, Lent, Load, Taken
from pdserve_bench.hops.link import DEVICE, NetNamespace

_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
_OVER_LINK = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
_QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Measured:
    taken: Taken
    lender_cpu: float
    """seconds, meanwhile"""


@dataclass(frozen=True)
class KvPair:
    lender: ends.End
    borrower: ends.End
    handshake: float
    """seconds from the lender's metadata in hand to a first block that had arrived"""

    async def measure(self, load: Load) -> Measured:
        """Raises EndLost, also where the wrong bytes arrived."""
        await self.borrower.ask(load, bool)
        before = await self.lender.ask(None, float)
        taken = await self.borrower.ask(None, Taken, ends.PATIENCE + load.seconds)
        return Measured(taken, await self.lender.ask(None, float) - before)


@asynccontextmanager
async def kv_pair(
    shape: PoolShape, seed: int, link: tuple[NetNamespace, NetNamespace] | None = None
) -> AsyncIterator[KvPair]:
    """Two new processes that have just connected, on this host or at the two ends of a link. Raises EndLost."""
    address = link[0].address if link else "127.0.0.1"
    variables = {**_QUIET, **os.environ, **(_OVER_LINK if link else _LOOPBACK)}
    argv = (msgspec.json.encode(shape).decode(), address, str(seed))
    async with AsyncExitStack() as stack:
        lender, borrower = [
            await stack.enter_async_context(
                ends.end("pdserve_bench.hops.kv_ends", part, *argv, variables=variables, place=place)
            )
            for part, place in zip(("lend", "borrow"), link or (None, None), strict=True)
        ]
        lent = await lender.answer(Lent)
        await borrower.answer(bool)
        yield KvPair(lender, borrower, await borrower.ask(Connect(lent, address), float))
