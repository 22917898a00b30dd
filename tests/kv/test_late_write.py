"""Why a stalled read is never failed (see `pdserve/kv/connector.py`): NIXL cannot stop it.

When this test fails after an upgrade, that has changed, and the quarantine may have become unnecessary.
"""

import asyncio
import os
import signal
import sys

import numpy as np
import psutil
import pytest

from pdserve.kv.nixl import provide_nixl, quiet_agents
from tests.conditions import until

SIZE = 1 << 20

PEER = """
import sys, numpy as np
from pdserve.kv.nixl import provide_nixl, quiet_agents
provide_nixl()
from nixl._api import nixl_agent, nixl_agent_config
with quiet_agents():
    agent = nixl_agent("peer", nixl_agent_config())
memory = np.full(1 << 20, 7, np.uint8)
agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
print(memory.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")


async def test_a_released_read_still_writes(over_tcp: None) -> None:
    provide_nixl()
    from nixl._api import nixl_agent, nixl_agent_config

    pipe = asyncio.subprocess.PIPE
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, stdin=pipe, stdout=pipe, env=os.environ, limit=1 << 20
    )
    try:
        assert peer.stdout is not None
        lines = [line.decode().split() async for line in _until_data(peer.stdout)]
        address, metadata = int(lines[-1][0]), bytes.fromhex(lines[-1][1])
        with quiet_agents():
            agent = nixl_agent("reader", nixl_agent_config())
        memory = np.zeros(SIZE, np.uint8)
        agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, SIZE, 0, "")], "DRAM"))
        name = agent.add_remote_agent(metadata)

        def read() -> tuple[object, object]:
            here = agent.get_xfer_descs([(memory.ctypes.data, SIZE, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, name)
            agent.transfer(handle)
            return handle, there

        handle, _ = read()
        await until(lambda: agent.check_xfer_state(handle) == "DONE")
        assert (memory == 7).all()
        agent.release_xfer_handle(handle)

        peer.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED)
        handle, _ = read()
        await asyncio.sleep(0.2)
        assert agent.check_xfer_state(handle) == "PROC"
        agent.release_xfer_handle(handle)
        agent.remove_remote_agent(name)
        memory[:] = 99
        peer.send_signal(signal.SIGCONT)
        await until(lambda: bool((memory == 7).any()))
    finally:
        peer.kill()
        await peer.wait()


async def _until_data(stream: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    """The peer's one line, whatever NIXL prints before it."""
    while line := await stream.readline():
        yield line
        if line[:1].isdigit() and b" " in line and len(line) > 100:
            return
