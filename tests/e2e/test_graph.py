"""What a user of a running graph sees besides tokens. (Responses and errors: `tests/conformance`.)"""

from pathlib import Path

import httpx
import msgspec
import pytest

from pdserve.contract.reports import Receipt
from tests.e2e.graph import RealGraph
from tests.listeners import listeners

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


def test_sockets_of_engines_are_in_folders_that_serve_removes(graph: RealGraph) -> None:
    folders = [process.environ().get("VLLM_RPC_BASE_PATH") for process in graph.processes()]
    (above,) = {Path(folder).parent for folder in folders if folder}
    assert len(list(above.glob("sockets-*/vllm_dist_*"))) == 2


def test_a_kv_transfer_is_in_metrics_and_receipt(graph: RealGraph) -> None:
    before = graph.metrics()
    body = {**chat("What is the code of the black door?"), "cache_salt": "transfer"}
    answer = httpx.post(f"{graph.url}/v1/chat/completions", json=body, timeout=120)
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    after = graph.metrics()
    moved = after("pdserve_kv_transfer_bytes_total") - before("pdserve_kv_transfer_bytes_total")
    # KV bytes per token: 2 x layers x KV heads x head size x dtype bytes. Whole blocks are transferred.
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
    # the decode hop is left out: it begins with the first token, which may come before the KV
    in_turn = [hop.seconds for hop in receipt.hops if hop.name != "decode"]
    assert sum(in_turn) <= receipt.seconds + 0.001
    assert there["decode"].start + there["decode"].seconds <= receipt.seconds + 0.001


def test_only_known_ports_listen(graph: RealGraph) -> None:
    """By default, processes listen on loopback only (docs/security.md)."""
    found = listeners(graph)
    others = found.pop(("VLLM::EngineCore", "TCP"))
    assert others <= 2 * 20  # UCX, the store and Gloo of each engine
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
        ("etcd", "TCP"): 1,  # for other etcd members
    }
