"""Clients that harm others: one that reads nothing, and one whose request kills the engine that it meets."""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx

from pdserve.messages import Role
from pdserve_bench.chaos.cases import LONGEST, simulated
from pdserve_bench.chaos.scene import Scenario, Scene

GREEDY, POLITE = "127.0.0.2", "127.0.0.3"
"""addresses of this machine that a client may come from"""
STREAMS = 200
OUTPUT = 1000
"""tokens that each of them asks for"""
GRACE = 10.0
"""seconds beyond the frontend's write-timeout that a polite client may wait: its turn, and a short answer"""
ASK_EVERY = 1.0
MOST_DEAD = 2
"""workers that one request may take along"""


async def read_nothing(scene: Scene) -> float | None:
    """The polite client comes from an address of its own, as the load does from a third."""
    address = urlsplit(scene.running.graph.url)
    if address.hostname not in ("127.0.0.1", "localhost"):
        raise LookupError("the frontend is not on this machine's loopback")
    assert scene.config.frontend is not None
    most = scene.config.frontend.write_timeout + GRACE
    waits: list[float] = []
    with ExitStack() as stack:
        for number in range(STREAMS):
            stack.enter_context(await asyncio.to_thread(_unread, scene, address.port or 80, number))
        scene.say(f"{STREAMS} streams of {OUTPUT} tokens that nobody reads, from {GREEDY}")
        end = time.monotonic() + max(most, scene.options.hold)
        while time.monotonic() < end:
            waits.append(await _ask(scene))
            await asyncio.sleep(ASK_EVERY)
    scene.say(f"a client from {POLITE} waited {max(waits):.1f} s at most, of {len(waits)} requests")
    if max(waits) > most:
        scene.amiss.append(
            f"a client from {POLITE} waited {max(waits):.1f} s beside streams that nobody reads "
            f"({most:g} s at most)"
        )
    return await scene.recovery()


def _unread(scene: Scene, port: int, number: int) -> socket.socket:
    body = {
        "model": scene.running.graph.model,
        "prompt": [300 + number, 301, 302],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    end = socket.socket()
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.settimeout(10)
        end.bind((GREEDY, 0))
        end.connect(("127.0.0.1", port))
        end.sendall(head.encode() + b"\r\n\r\n" + raw)
    except OSError:
        pass  # refused: that is an answer too
    return end


async def _ask(scene: Scene) -> float:
    """Seconds until a short request was answered; one that is refused has waited as long as is allowed."""
    body = {"model": scene.running.graph.model, "prompt": [400, 401], "max_tokens": 4, "ignore_eos": True}
    began = time.monotonic()
    transport = httpx.AsyncHTTPTransport(local_address=POLITE)
    async with httpx.AsyncClient(transport=transport, timeout=scene.options.patience) as http:
        with suppress(httpx.HTTPError):
            answer = await http.post(f"{scene.running.graph.url}/v1/completions", json=body)
            if answer.status_code == 200:
                return time.monotonic() - began
    return max(time.monotonic() - began, scene.options.patience)


UNREAD_STREAMS = Scenario(
    "unread-streams",
    f"{STREAMS} streams from {GREEDY} that nobody reads; {POLITE} is served nevertheless",
    read_nothing,
)


async def poison(scene: Scene) -> float | None:
    """A short one, which meets decode workers alone, and a long one, which meets prefill workers first."""
    model = simulated(scene.config)
    if model is None or not model.fatal_token:
        raise LookupError("only simulated engines with a fatal-token are killed by a prompt")
    for length in (8, 8 * scene.config.decode.max_local_prefill_length if scene.config.decode else 8):
        before = {each.id for each in await scene.instances(Role.DECODE, Role.PREFILL)}
        status, text = await _send_poison(scene, [model.fatal_token] * min(length, LONGEST))
        recovered = await scene.recovery()
        dead = before - {each.id for each in await scene.instances(Role.DECODE, Role.PREFILL)}
        scene.say(f"poison of {length} tokens: {len(dead)} workers died, HTTP {status} {text}")
        if len(dead) > MOST_DEAD:
            scene.amiss.append(f"{len(dead)} workers died of one poison: {', '.join(sorted(dead))}")
        if not 400 <= status < 600 or status == 503 or not text:
            scene.amiss.append(f"poison of {length} tokens ended with HTTP {status} {text}")
        if not dead:
            scene.amiss.append("no worker died: it was no poison")
    return recovered


async def _send_poison(scene: Scene, prompt: Sequence[int]) -> tuple[int, str]:
    """Status and message; 0 where there was no answer."""
    body = {"model": scene.running.graph.model, "prompt": list(prompt), "max_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=scene.options.patience, trust_env=False) as http:
        try:
            answer = await http.post(f"{scene.running.graph.url}/v1/completions", json=body)
            return answer.status_code, str(answer.json()["error"]["message"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return 0, repr(error)


POISON = Scenario(
    "poison", "requests that kill the engine that they meet (simulated engines)", poison, kills_decode=True
)
