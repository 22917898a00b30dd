"""The two processes with which `pdserve doctor` measures KV transfer: each has a NIXL agent, and one reads the other's
memory over UCX. `python -m pdserve.cli.doctor_transfer lend` prints, as one line of JSON, what another process needs
to read its memory, and lends it until stdin ends; `... borrow` takes that line on stdin and prints the result."""

import base64
import importlib
import json
import os
import sys
import time
from typing import Any

SIZE = 64 << 20
"""bytes per transfer: about the KV of 1,000 tokens of an 8B model"""
SECONDS = 1.0


def lend() -> None:
    agent, buffer = _agent("lender")
    offer = {"agent": base64.b64encode(agent.get_agent_metadata()).decode(), "address": buffer.data_ptr()}
    print(json.dumps(offer), flush=True)
    sys.stdin.read()


def borrow() -> None:
    offer = json.loads(sys.stdin.readline())
    agent, buffer = _agent("borrower")
    lender = agent.add_remote_agent(base64.b64decode(offer["agent"]))
    here = agent.get_xfer_descs([(buffer.data_ptr(), SIZE, 0)], "DRAM")
    there = agent.get_xfer_descs([(offer["address"], SIZE, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", here, there, lender)
    _once(agent, handle)  # the first transfer connects
    count, started = 0, time.monotonic()
    while time.monotonic() - started < SECONDS:
        _once(agent, handle)
        count += 1
    speed = count * SIZE / (time.monotonic() - started) / 1e9
    if bytes(buffer[:8].tolist()) != b"\x07" * 8:
        raise RuntimeError("the bytes that arrived are not those that were sent")
    print(
        json.dumps({"gigabytes_per_second": speed, "backend": agent.query_xfer_backend(handle)}), flush=True
    )


def _agent(name: str) -> tuple[Any, Any]:
    """An agent, and memory of it that others may read; the lender's is full of sevens."""
    import torch

    from pdserve.kv.nixl import provide_nixl, quiet_agents

    provide_nixl()
    api = importlib.import_module("nixl._api")
    with quiet_agents():  # as in the graph
        agent = api.nixl_agent(f"doctor-{name}-{os.getpid()}", api.nixl_agent_config(backends=["UCX"]))
    buffer = torch.full((SIZE,), 7 if name == "lender" else 0, dtype=torch.uint8)
    agent.register_memory([(buffer.data_ptr(), SIZE, 0, "")], "DRAM")
    return agent, buffer


def _once(agent: Any, handle: Any) -> None:
    state = agent.transfer(handle)
    while state != "DONE":
        if state == "ERR":
            raise RuntimeError("the transfer failed")
        state = agent.check_xfer_state(handle)


if __name__ == "__main__":
    {"lend": lend, "borrow": borrow}[sys.argv[1]]()
