"""KV transfer measured: two processes, a NIXL agent in each, one reads the other's memory over UCX.

Also the program of both processes: `python -m pdserve.cli.doctor.transfer lend` prints, as one line of JSON, what
another needs to read its memory, and lends it until stdin ends; `... borrow` takes that line on stdin and
prints the result.
"""

import asyncio
import base64
import importlib
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

from pdserve.cli.doctor.finding import Finding, fail, ok, warn

SIZE = 64 << 20
"""bytes per transfer: about the KV of 1,000 tokens of an 8B model"""
SECONDS = 1.0
PATIENCE = 60.0
SLOW = 0.5
"""GB/s; plain TCP between two processes of one machine is faster"""


async def transfer() -> Finding:
    """Never fails itself."""
    try:
        async with asyncio.timeout(PATIENCE):
            speed, backend = await _measure()
    except TimeoutError:
        return fail("KV transfer", f"no result after {PATIENCE:g} s", "see what UCX_LOG_LEVEL=info says.")
    except RuntimeError as error:
        return fail("KV transfer", str(error), "run `make install`; see what UCX_LOG_LEVEL=info says.")
    text = f"{speed:.1f} GB/s through host memory between two processes ({backend})"
    if speed < SLOW:
        advice = (
            "is the machine busy? Else check UCX_TLS, and ptrace rights between processes (CAP_SYS_PTRACE)."
        )
        return warn("KV transfer", text, advice)
    return ok("KV transfer", text)


async def _measure() -> tuple[float, str]:
    lender = await _start("lend")
    try:
        offer = await _line(lender)
        borrower = await _start("borrow")
        try:
            assert borrower.stdin is not None
            borrower.stdin.write(offer)
            result = json.loads(await _line(borrower))
        finally:
            await _end(borrower)
    finally:
        await _end(lender)
    return float(result["gigabytes_per_second"]), str(result["backend"])


async def _start(part: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "pdserve.cli.doctor.transfer", part)
    env = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore", **os.environ}
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env)


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    if line := await process.stdout.readline():
        return line
    raise RuntimeError("a NIXL process ended without a word")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


# the two processes


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
    _once(agent, handle)  # the first one connects
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
