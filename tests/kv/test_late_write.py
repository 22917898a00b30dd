"""Why a stalled read is never failed (see `pdserve/kv/connector.py`): NIXL cannot stop it.

When this test fails after an upgrade, that has changed, and the quarantine may have become unnecessary.
"""

import asyncio
import signal
import sys

import msgspec
import numpy as np
import psutil
import pytest

from pdserve.cli.doctor_transfer import SHAPE
from pdserve.kv.pool import KvPool, PoolOffer
from tests.conditions import until


async def test_a_released_read_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    lend = (sys.executable, "-m", "pdserve.cli.doctor_transfer", "lend")
    pipe = asyncio.subprocess.PIPE
    peer = await asyncio.create_subprocess_exec(*lend, stdin=pipe, stdout=pipe, limit=1 << 20)
    try:
        assert peer.stdout is not None
        while not (offer := await peer.stdout.readline()).startswith(b"{"):
            assert offer, "the peer ended"
        pool = KvPool("reader", SHAPE)
        remote = pool.connect(msgspec.json.decode(offer, type=PoolOffer))
        every = np.arange(SHAPE.blocks, dtype=np.int32)
        remote.read(every, every).wait()
        assert (pool.memory == 7).all()

        peer.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED, 30)
        stalled = remote.read(every, every)
        await asyncio.sleep(0.2)
        assert not stalled.done()
        pool.agent.release_xfer_handle(stalled._handle)
        pool.agent.remove_remote_agent(f"doctor-lender-{peer.pid}")
        pool.memory[:] = 99
        peer.send_signal(signal.SIGCONT)
        await until(lambda: bool((pool.memory == 7).any()), 30)
    finally:
        peer.kill()
        await peer.wait()
