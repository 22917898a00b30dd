"""Why a stalled read is never failed (see `pdserve/kv/connector.py`): NIXL cannot stop it.

When this test fails after an upgrade, that has changed, and the quarantine may have become unnecessary.
"""

import asyncio
import base64
import importlib
import json
import os
import signal
import sys
from typing import Any

import numpy as np
import psutil
import pytest

from pdserve.kv.nixl import provide_nixl, quiet_agents
from tests.conditions import holds, until

SIZE = 64 << 20
"""bytes; more than what is on its way at a time"""


class Memory:
    """Host memory that another process may read."""

    def __init__(self) -> None:
        provide_nixl()
        api = importlib.import_module("nixl._api")
        with quiet_agents():
            self.agent = api.nixl_agent(f"agent-{os.getpid()}", api.nixl_agent_config(num_threads=4))
        self.bytes = np.zeros(SIZE, np.uint8)
        self.region = [(int(self.bytes.ctypes.data), SIZE, 0, "")]
        self.agent.register_memory(self.agent.get_reg_descs(self.region, "DRAM"))

    def read(self, peer: str, address: int) -> tuple[Any, str]:
        """Begin to copy the peer's memory here; return NIXL's handle and state."""
        ours = self.agent.get_xfer_descs([(self.region[0][0], SIZE, 0)], "DRAM")
        theirs = self.agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", ours, theirs, peer)
        return handle, self.agent.transfer(handle)


def lend() -> None:
    memory = Memory()
    memory.bytes[:] = 7
    metadata = base64.b64encode(memory.agent.get_agent_metadata()).decode()
    print(json.dumps({"agent": metadata, "address": memory.region[0][0]}), flush=True)
    sys.stdin.read()


async def test_a_released_read_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", "from tests.kv.test_late_write import lend; lend()")
    peer = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
    try:
        assert peer.stdout is not None
        while not (offer := await peer.stdout.readline()).startswith(b"{"):
            assert offer, "the peer ended"
        lent, memory = json.loads(offer), Memory()
        name = memory.agent.add_remote_agent(base64.b64decode(lent["agent"]))
        whole, _ = memory.read(name, lent["address"])
        await until(lambda: memory.agent.check_xfer_state(whole) == "DONE", 30)
        assert (memory.bytes == 7).all()

        peer.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED, 30)
        stalled, _ = memory.read(name, lent["address"])
        await holds(lambda: memory.agent.check_xfer_state(stalled) == "PROC")
        memory.agent.release_xfer_handle(stalled)
        memory.agent.remove_remote_agent(name)
        memory.bytes[:] = 99
        peer.send_signal(signal.SIGCONT)
        await until(lambda: bool((memory.bytes == 7).any()), 30)
    finally:
        peer.kill()
        await peer.wait()
