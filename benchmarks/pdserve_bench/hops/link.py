"""Two network namespaces, and between them a cable that carries so many bits per second.

The namespaces have no names and no files. Each is held by a process of ours (`cat`) that ends when its stdin closes,
also when this process is killed; with the last process in it, the kernel removes a namespace and the devices in it. So
there is nothing that could be left behind. They are made as root or, where the kernel lets it, as any user (root, then,
inside a user namespace).

The rate is a token bucket's (`tc ... tbf`), at both ends, counted in Ethernet frames as on a cable. UCX must be told to
use TCP there (`UCX_TLS`): it would go past the cable, through shared memory."""

import asyncio
import contextlib
import os
import re
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from pdserve.errors import ConfigError

DEVICE = "kv0"
"""the cable's end in each of the two"""
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
_HOLD = "mount -t sysfs none /sys && echo held && exec cat"
"""UCX finds the devices in /sys, which shows those of the namespace in which it was mounted"""
_BUCKET = 0.0003
"""seconds at full rate that an idle link has in store; with less, late timers of the kernel would slow it"""
_SEGMENT = 16 << 10
"""bytes that the device takes at once, and the least that the bucket holds"""
_QUEUE = 0.05
"""seconds at full rate that wait in the device before packets are dropped"""
_UNITS = {"mbit": 1e6, "gbit": 1e9}


class NoNamespaces(Exception):
    """They cannot be made here; the text says why."""


@dataclass(frozen=True)
class NetNamespace:
    pid: int
    """of the process that holds it"""
    options: tuple[str, ...]
    """of `nsenter`"""
    address: str

    def command(self, *argv: str) -> tuple[str, ...]:
        """The command line that runs `argv` in it, in the same process, in the folder /."""
        return ("nsenter", "--target", str(self.pid), *self.options, *argv)


@asynccontextmanager
async def shaped_link(rate: float) -> AsyncIterator[tuple[NetNamespace, NetNamespace]]:
    """`rate` in bits per second, each way. Raises NoNamespaces."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoNamespaces(f"{' and '.join(missing)} not found (in the packages util-linux and iproute2)")
    async with AsyncExitStack() as stack:
        left = await _first(stack)
        right = await _hold(stack, left.command("unshare", "--net", "--mount"), left.options, _ADDRESSES[1])
        peer = ("peer", "name", DEVICE, "netns", str(right.pid))
        await _run(left, "ip", "link", "add", DEVICE, "type", "veth", *peer)
        for end in (left, right):
            await _set_up(end, rate)
        for end in (left, right):
            await _until_up(end)
        yield left, right


def bits_per_second(text: str) -> float:
    """Parse `200mbit` or `1gbit`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mg]bit)", text.strip().lower())
    if not found or not float(found[1]):
        raise ConfigError([f"--link {text}: give a rate as in 200mbit, 1gbit or 10gbit."])
    return float(found[1]) * _UNITS[found[2]]


async def _first(stack: AsyncExitStack) -> NetNamespace:
    """Root need not have the right (as in most containers), and may still make a user namespace."""
    plain, user = ("--net", "--mount"), ("--user", "--net", "--mount")
    if os.geteuid() == 0:
        with contextlib.suppress(NoNamespaces):
            return await _hold(stack, ("unshare", *plain), plain, _ADDRESSES[0])
    enter = (*user, "--preserve-credentials")
    return await _hold(stack, ("unshare", "--map-root-user", *user), enter, _ADDRESSES[0])


async def _hold(
    stack: AsyncExitStack, unshare: tuple[str, ...], options: tuple[str, ...], address: str
) -> NetNamespace:
    process = await asyncio.create_subprocess_exec(
        *unshare, "sh", "-c", _HOLD, stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0
    )
    stack.push_async_callback(_end, process)
    assert process.stdout is not None
    assert process.stderr is not None
    if await process.stdout.readline() != b"held\n":
        problem = (await process.stderr.read()).decode().strip().splitlines()
        raise NoNamespaces(problem[-1] if problem else "unshare failed without a word")
    return NetNamespace(process.pid, options, address)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _set_up(end: NetNamespace, rate: float) -> None:
    await _run(end, "ip", "link", "set", "lo", "up")
    await _run(end, "ip", "address", "add", f"{end.address}/30", "dev", DEVICE)
    await _run(end, "ip", "link", "set", DEVICE, "up", "gso_max_size", str(_SEGMENT))
    bucket, queue = max(_SEGMENT, int(rate / 8 * _BUCKET)), max(16 * _SEGMENT, int(rate / 8 * _QUEUE))
    sizes = ("rate", f"{rate:.0f}bit", "burst", str(bucket), "limit", str(queue))
    await _run(end, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *sizes)


async def _until_up(end: NetNamespace) -> None:
    """The kernel reports the other end's coming up some milliseconds later, and UCX leaves out what is not up."""
    for _ in range(200):
        if "state UP" in await _run(end, "ip", "link", "show", DEVICE):
            return
        await asyncio.sleep(0.01)
    raise NoNamespaces("the link does not come up")


async def _run(end: NetNamespace, *argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *end.command(*argv), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        said, problem = await process.communicate()
    finally:
        await _end(process)
    if process.returncode:
        raise NoNamespaces(f"`{' '.join(argv)}`: {problem.decode().strip()}")
    return said.decode()
