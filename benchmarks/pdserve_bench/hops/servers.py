"""The two servers whose frontends are compared, both with engines that cost nothing: the graph on a simulated engine,
and vLLM's own API server without one (`vllm_app`). Their engines take the same time for a step and generate the same
token, always: so the text that a client got says how many tokens it is, however they were put into chunks."""

import resource
from collections.abc import Mapping
from typing import Any

from pdserve.demo import MODEL_DIR
from pdserve_bench.simulated import simulated
from pdserve_bench.systems.system import GraphSystem, PlainVllm, System

TOKEN, WORD = 316, " code"
"""in the demo model's tokenizer"""
STEP, SEQUENCE = 0.005, 1 / 3000
"""seconds of a step, and of each request in it: many streams get 3,000 tokens per second together"""
MODEL = "demo"
PROMPT = 16
"""tokens, about; some more for the words around a chat"""
_LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
"""long windows need longer streams than the demo model was made for; no model computes them"""
_BLOCK = 32
_ROOM = 64


def graph(streams: int, tokens: int) -> System:
    """The graph for so many streams of up to `tokens` tokens at a time."""
    longest = -(-(tokens + _ROOM) // _BLOCK) * _BLOCK
    speed = {
        "step-seconds": STEP,
        "sequence-seconds": SEQUENCE,
        "prefill-rate": 1e9,
        "first-token": TOKEN,
        "tokens": 1,
    }
    engine: Mapping[str, Any] = {
        "max-num-seqs": streams,
        "max-num-batched-tokens": max(8192, 2 * _ROOM * streams),
        "num-gpu-blocks-override": 2 * streams * longest // _BLOCK,
        "remote-prefill": False,
    }
    limits = {"max-waiting": 2 * streams, "max-waiting-tokens": 2 * streams * longest}
    common = {"max-model-len": longest}
    sections = simulated(speed, decode=engine, frontend=limits, common=common)
    del sections["PrefillWorker"]
    return GraphSystem("pdserve", sections, variables=_LONG)


def vllm_app(name: str, tokens: int) -> System:
    """vLLM's own API server, the engine core beside it simulated, for streams of up to `tokens` tokens."""
    engine = ("--step-seconds", str(STEP), "--sequence-seconds", str(SEQUENCE), "--token", str(TOKEN), "--")
    arguments = ("--host", "127.0.0.1", "--max-model-len", str(tokens + _ROOM))
    program = ("pdserve_bench.hops.vllm_app", *engine)
    return PlainVllm(name, MODEL_DIR, MODEL, arguments, _LONG, program)


def most_connections() -> int:
    """How many this process, and those that it starts from now on, may have open at a time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(0, hard - 200)
