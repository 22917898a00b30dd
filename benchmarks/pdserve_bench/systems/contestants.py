"""What is compared with the baseline: one graph under several live settings, in force before it is measured."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.config.schema import Config, DecodeConfig
from pdserve.decode.policy import LiveSettings, decide
from pdserve.errors import Unavailable
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.systems.system import ALL_LOCAL, ALL_REMOTE, RunningSystem

GRAPH = "pdserve"
LOCAL, REMOTE_ONLY = f"{GRAPH} local", f"{GRAPH} remote"
_WITHIN = 20.0
_SHORT, _LONG = 8, 380
"""prompt tokens of a probe"""


@dataclass(frozen=True)
class Contestant:
    name: str
    system: str
    """that answers, by its name: several contestants may be one system under different settings"""
    told: str
    settings: Mapping[str, str] | None = None
    """live settings; None: it has none"""


def graph_contestants(config: Config) -> tuple[list[Contestant], list[str]]:
    """Of one graph: all local, all remote, and as it decides; and why any of them is left out."""
    decode = config.decode
    if decode is None or not decode.remote_prefill:
        told = "the graph of the file, which has no remote prefill"
        return [Contestant(GRAPH, GRAPH, told)], [
            "The file's graph does not separate: there is one of it to measure."
        ]
    remote = Contestant(REMOTE_ONLY, GRAPH, "every prompt is prefilled by a prefill worker", ALL_REMOTE)
    if not decode.conditional_disagg:
        note = "conditional-disagg is false in the file: the graph can be neither all local nor decide by itself."
        return [remote], [note]
    local = Contestant(LOCAL, GRAPH, "every prompt is prefilled where it is decoded", ALL_LOCAL)
    length, queue = decode.max_local_prefill_length, decode.max_prefill_queue_size
    thresholds = f"remote above {length} tokens while fewer than {queue} requests wait"
    return [local, remote, Contestant(GRAPH, GRAPH, f"as it decides: {thresholds}", {})], []


async def put_in_force(
    running: RunningSystem, settings: Mapping[str, str], config: DecodeConfig, prompts: Prompts
) -> None:
    """Apply the settings, and ask until a short and a long prompt are placed as they say, on as many requests in a row
    as there are decode workers. Raises Unavailable where they are not in time."""
    await running.apply(settings)
    live = LiveSettings(config)
    live.read(settings)
    deadline, right, last = time.monotonic() + _WITHIN, 0, ""
    while right < 2 * config.count:
        tokens = (_SHORT, _LONG)[right % 2]
        probe = await _probe(running.endpoint, prompts.of(tokens))
        expected = decide(probe.prompt_tokens or tokens, 0, 0, 1, True, live.current).mode
        good = not probe.error and probe.prefill == expected
        right = right + 1 if good else 0
        last = probe.error or f"a prompt of {probe.prompt_tokens} tokens went {probe.prefill or 'nowhere'}"
        if not good and time.monotonic() > deadline:
            raise Unavailable(
                f"{running.endpoint.url}: the live settings {settings} are not in force: {last}."
            )
        if not good:
            await asyncio.sleep(0.1)


async def _probe(endpoint: Endpoint, prompt: str) -> Exchange:
    exchange = Exchange(endpoint.body(prompt, 2))
    await endpoint.ask(exchange, _WITHIN)
    return exchange
