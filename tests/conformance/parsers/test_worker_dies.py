"""The decode worker dies in the middle of tool calls, reasoning and JSON: the client sees the same as from vLLM."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Semaphore

import httpx
import pytest

from tests.conformance.answers import differences, events_of
from tests.conformance.asking import CHAT, Body, body
from tests.conformance.parsers.test_tools import HELLO, written
from tests.conformance.parsers.thinking import Thinking
from tests.conformance.responses.test_structured import schema
from tests.real import KEY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

MANY = 300
CALL = rf'<tool_call>\{{"name": "get_time", "arguments": \{{"zone": "[a-c]{{{MANY}}}"\}}\}}</tool_call>'
WORDS: Body = {
    "type": "array",
    "items": {"type": "string", "minLength": 30, "maxLength": 40},
    "minItems": MANY,
    "maxItems": MANY,
}
KINDS: dict[str, Body] = {
    "a call": written(CALL, max_tokens=2 * MANY),
    "thoughts": {"ignore_eos": True, "max_tokens": MANY},
    "JSON after thoughts": {"response_format": schema(WORDS), "max_tokens": MANY},
    "penalties": {"presence_penalty": 0.2, "ignore_eos": True, "max_tokens": MANY},
}


def test_streams_equal_vllms_when_the_worker_dies(thinking: Thinking) -> None:
    """The only decode worker dies and the prefill worker stands in. Requests with grammars or penalties are replayed;
    reasoning continues."""
    graph = thinking.graph
    requests = [body(CHAT, HELLO, stream=True, **fields) for fields in KINDS.values()]
    in_the_middle = Semaphore(0)

    def follow(url: str, asked: Body) -> str:
        lines = []
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", url + CHAT, json=asked, headers=headers, timeout=240) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 40:
                    in_the_middle.release()
        return "\n".join(lines)

    before = graph.metrics()("pdserve_migrations_total")
    state = json.loads(graph.pdserve("status", "--json").stdout)
    pid = next(instance["pid"] for instance in state["instances"] if instance["role"] == "decode")
    with ThreadPoolExecutor(len(requests)) as pool:
        theirs = list(pool.map(partial(follow, thinking.pair.theirs), requests))
        in_the_middle = Semaphore(0)
        ours = [pool.submit(follow, thinking.pair.ours, asked) for asked in requests]
        for _ in requests:
            assert in_the_middle.acquire(timeout=120)
        assert not any(future.done() for future in ours)
        os.kill(pid, signal.SIGKILL)
    for kind, mine, their in zip(KINDS, ours, theirs, strict=True):
        assert not list(differences(events_of(mine.result()), events_of(their))), kind
    assert graph.metrics()("pdserve_migrations_total") - before >= len(KINDS)
