"""What a user of a running graph sees beside the tokens. (What answers say and refuse: `tests/conformance`.)"""

import json
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx
import msgspec
import pytest

from pdserve.watch import Receipt
from tests.e2e.graph import RealGraph
from tests.listeners import listeners
from tests.serving import until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

FACTS = " ".join(
    f"The code of the {colour} {thing} is {code}."
    for colour, thing, code in [
        ("red", "box", 4711),
        ("blue", "box", 1234),
        ("green", "cup", 9052),
        ("black", "door", 3377),
    ]
)
FILLER = " The weather was fine and the people went for a walk." * 40


def chat(question: str) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{FACTS}{FILLER} {question}"}],
        "temperature": 0,
        "max_tokens": 16,
    }


def test_recalls_a_fact_over_remote_kv(graph: RealGraph) -> None:
    response = httpx.post(
        f"{graph.url}/v1/chat/completions", json=chat("What is the code of the red box?"), timeout=120
    )
    assert response.status_code == 200
    assert "4711" in response.json()["choices"][0]["message"]["content"]
    assert response.headers["x-pdserve-prefill"] == "remote"
    assert response.headers["x-pdserve-instance"].startswith("decode-0-")
    assert response.headers["x-request-id"]


def test_sockets_of_engines_are_in_the_folder_that_serve_empties(graph: RealGraph) -> None:
    folders = [process.environ().get("VLLM_RPC_BASE_PATH") for process in graph.processes()]
    (folder,) = {Path(folder) for folder in folders if folder}
    assert len(list(folder.glob("vllm_dist_*"))) == 2


def test_transfer_is_counted(graph: RealGraph) -> None:
    before = graph.metrics()
    body = {**chat("What is the code of the black door?"), "cache_salt": "transfer"}
    trace_id = uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    answer = httpx.post(f"{graph.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    after = graph.metrics()
    moved = after("pdserve_kv_transfer_bytes_total") - before("pdserve_kv_transfer_bytes_total")
    # FACTS: bytes per token = 2 x layers x kv heads x head dim x dtype bytes, and whole blocks move.
    per_token = 2 * 4 * 2 * 64 * 4
    blocks = -(-prompt_tokens // 32)
    assert moved == pytest.approx(blocks * 32 * per_token, rel=0.1)
    count = "pdserve_kv_transfer_seconds_count"
    assert after(count) == before(count) + 1
    traced = graph.pdserve("trace", answer.headers["x-request-id"], "--json", "-f", str(graph.file))
    receipt = msgspec.json.decode(traced.stdout, type=Receipt)
    there = {hop.name: hop for hop in receipt.hops}
    assert {"queue", "prefill", "transfer", "first-step"} < there.keys()
    assert there["prefill"].instance == there["transfer"].instance != there["first-step"].instance
    assert all(0 < there[name].seconds < receipt.seconds for name in ("prefill", "transfer", "first-step"))
    # decode begins with the first token, which may have come from the prefill worker, before the KV
    in_turn = [hop.seconds for hop in receipt.hops if hop.name != "decode"]
    assert sum(in_turn) <= receipt.seconds + 0.001
    assert there["decode"].start + there["decode"].seconds <= receipt.seconds + 0.001
    assert receipt.trace_id == trace_id
    check_trace(graph, receipt)


def check_trace(graph: RealGraph, receipt: Receipt) -> None:
    """Each hop of the receipt is one span, with the same start and duration, but for what the messages between the
    processes take, which say durations alone."""
    names = sorted(["POST /v1/chat/completions", "attempt", "generate", *(hop.name for hop in receipt.hops)])
    with suppress(AssertionError):
        until(lambda: sorted(span.name for span in graph.collector.of(receipt.trace_id)) == names, graph, 10)
    spans = {span.name: span for span in graph.collector.of(receipt.trace_id)}
    assert sorted(span.name for span in graph.collector.of(receipt.trace_id)) == names
    root = spans["POST /v1/chat/completions"]
    assert (root.end - root.start) / 1e9 == pytest.approx(receipt.seconds, abs=0.5)
    for hop in receipt.hops:
        span = spans[hop.name]
        assert (span.end - span.start) / 1e9 == pytest.approx(hop.seconds, abs=0.5), hop
        assert (span.start - root.start) / 1e9 == pytest.approx(hop.start, abs=0.5), hop


def test_nothing_listens_but_what_is_known(graph: RealGraph) -> None:
    """And on the loopback device alone, where the file says nothing else. See docs/security.md."""
    found = listeners(graph)
    others = found.pop(("VLLM::EngineCore", "TCP"))
    assert others <= 2 * 20  # each engine's UCX, its store, and Gloo's connections between ranks
    assert found == {
        ("frontend", "HTTP"): 1,
        ("frontend", "pages"): 1,
        ("decode", "tls"): 1,
        ("prefill", "tls"): 1,
        ("decode", "pages"): 1,
        ("prefill", "pages"): 1,
        ("VLLM::EngineCore", "KV side channel"): 2,
        ("nats-server", "clients"): 1,
        ("etcd", "clients"): 1,
        ("etcd", "TCP"): 1,  # other etcds
    }


ASKED: dict[str, dict[str, object]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "two answers": {"n": 2, "temperature": 1.0, "top_k": 1},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": ["e"]},
    "stop tokens": {"stop_token_ids": list(range(0, 1024, 2))},
    "stop tokens later": {"stop_token_ids": list(range(0, 1024, 2)), "min_tokens": 2},
    "ignore_eos": {"ignore_eos": True},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "seed": {"temperature": 1.0, "seed": 3},
    "grammar": {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    "bias": {"logit_bias": {"300": 5.0}},
}


async def test_the_first_token_is_the_same_from_a_remote_and_a_local_prefill(graph: RealGraph) -> None:
    """Prefilled remotely, and locally: as one engine answers."""
    prompt = [300 + (i * i) % 700 for i in range(320)]

    async def answers(client: httpx.AsyncClient, prefill: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, asked in ASKED.items():
            body = {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0,
                "return_token_ids": True,
            }
            body |= {"cache_salt": f"{name} {prefill}", **asked}
            response = await client.post(f"{graph.url}/v1/completions", json=body, timeout=120)
            assert response.status_code == 200, (name, response.text)
            local = prefill == "local" or "prompt_logprobs" in asked or "echo" in asked
            assert response.headers["x-pdserve-prefill"] == ("local" if local else "remote"), name
            # what else is in the batch changes the last bits of a logprob, now and then
            answer = json.loads(response.text, parse_float=lambda text: round(float(text), 3))
            found[name] = [answer[key] for key in ("choices", "usage")]
        return found

    async with httpx.AsyncClient() as client:
        remote = await answers(client, "remote")
        try:
            assert graph.pdserve("set", "max-local-prefill-length=4000").returncode == 0
            local = await answers(client, "local")
        finally:
            assert graph.pdserve("set", "--unset", "max-local-prefill-length").returncode == 0
    for name in ASKED:
        assert remote[name] == local[name], name
