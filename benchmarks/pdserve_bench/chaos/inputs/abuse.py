"""Abusive clients: one that does not read its streams, and one whose prompt kills the engine that computes it."""

import asyncio
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

from pdserve.contract.records import Role
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.questions import LONGEST, Attempt, simulated
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.client import Exchange, LoadClient, post, send_unread

GREEDY, POLITE = "127.0.0.2", "127.0.0.3"
STREAMS = 200
OUTPUT = 1000
MAX_EXTRA_WAIT = 5.0
"""By how many seconds the waits of other clients for a response or a token may grow."""
QUIET_SAMPLES = 3
ASK_EVERY = 1.0
MAX_DEAD_WORKERS = 2


async def read_nothing(scene: Scene) -> float | None:
    """Open streams from one address without reading them, and time short requests from another."""
    address = urlsplit(scene.running.graph.url)
    if address.hostname not in ("127.0.0.1", "localhost"):
        raise Cannot("the frontend is not on this machine's loopback")
    assert scene.config.frontend is not None
    quiet = max([await _wait_of_polite(scene) for _ in range(QUIET_SAMPLES)])
    calm, began, waits = _longest_pause(scene.load.done), time.monotonic(), list[float]()
    with ExitStack() as stack:
        for number in range(STREAMS):
            if sock := await asyncio.to_thread(_unread, scene, number):
                stack.enter_context(sock)
        scene.say(f"{STREAMS} streams of {OUTPUT} tokens from {GREEDY} that are not read")
        end = time.monotonic() + max(scene.config.frontend.write_timeout, scene.options.hold)
        while time.monotonic() < end:
            waits.append(await _wait_of_polite(scene))
            await asyncio.sleep(ASK_EVERY)
    recovered = await scene.recovery()
    paused = _longest_pause(attempt for attempt in scene.load.done if attempt.ended > began)
    for client, most, usual in ((POLITE, max(waits), quiet), ("the load's address", paused, calm)):
        told = f"a client from {client} waited up to {most:.1f} s ({usual:.1f} s before)"
        scene.say(told)
        if most > usual + MAX_EXTRA_WAIT:
            scene.amiss.append(f"{told}, but unread streams may cost at most {MAX_EXTRA_WAIT:g} s")
    return recovered


def _longest_pause(attempts: Iterable[Attempt]) -> float:
    """Return the longest wait for a token in the streamed attempts, in seconds."""
    return max((attempt.longest_wait for attempt in attempts if attempt.case.stream), default=0.0)


def _unread(scene: Scene, number: int) -> socket.socket | None:
    """Send a long streamed request and return its socket unread; None if the connection fails, which is allowed."""
    url = scene.running.graph.url
    body = {
        "model": scene.running.graph.model,
        "prompt": [300 + number, 301, 302],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
    }
    with suppress(OSError):
        return send_unread(url, post(url, body), GREEDY)
    return None


async def _ask(scene: Scene, prompt: Sequence[int], source: str = "") -> Exchange:
    body = {"model": scene.running.graph.model, "prompt": list(prompt), "max_tokens": 4, "ignore_eos": True}
    exchange = Exchange(body)
    await LoadClient(scene.running.graph.url, source=source).ask(exchange, scene.options.patience)
    return exchange


async def _wait_of_polite(scene: Scene) -> float:
    """Return the seconds of a short request; at least `patience` if it failed."""
    exchange = await _ask(scene, [400, 401], POLITE)
    waited = exchange.ended - exchange.started
    return max(waited, scene.options.patience) if exchange.error else waited


UNREAD_STREAMS = Fault(
    "unread-streams",
    f"{STREAMS} streams from {GREEDY} that are not read; {POLITE} must be served",
    read_nothing,
)


async def poison(scene: Scene) -> float | None:
    """Send a short prompt, which reaches decode workers only, and a long one, which reaches prefill workers first."""
    model = simulated(scene.config)
    if model is None or not model.fatal_token:
        raise Cannot("only simulated engines with a fatal-token are killed by a prompt")
    for length in (8, 8 * scene.config.decode.max_local_prefill_length if scene.config.decode else 8):
        before = await _workers(scene)
        exchange = await _ask(scene, [model.fatal_token] * min(length, LONGEST))
        recovered = await scene.recovery()
        dead = before - await _workers(scene)
        scene.say(f"poison of {length} tokens: {len(dead)} workers died, {exchange.error}")
        if len(dead) > MAX_DEAD_WORKERS:
            scene.amiss.append(f"{len(dead)} workers died of one poison prompt: {', '.join(sorted(dead))}")
        if not 400 <= exchange.status < 600 or exchange.status == 503:
            scene.amiss.append(f"poison of {length} tokens ended with {exchange.error or 'a response'}")
        if not dead:
            scene.amiss.append("no worker died of the poison prompt")
    return recovered


async def _workers(scene: Scene) -> set[str]:
    return {instance.id for instance in await scene.watch.instances(Role.DECODE, Role.PREFILL)}


POISON = Fault(
    "poison",
    "requests that kill the engine that computes them (simulated engines)",
    poison,
    kills_decode=True,
)
