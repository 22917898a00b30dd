"""Receipts of a frontend's requests: where each went, why, and how long each hop took."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace
from vllm.v1.engine import FinishReason

from pdserve.config.api_keys import ApiKey
from pdserve.contract import reports
from pdserve.contract.messages import Failed, Hop
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.contract.reports import ProcessReport, Receipt
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.observability import receipts
from pdserve.observe.process_pages import serve_pages
from pdserve.registry import keys
from tests.conditions import until
from tests.decode.graph import counted
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import EchoWorker, Step
from tests.frontend.sequence.test_moving import post, steps
from tests.frontend.test_generate import PROMPT, chat, complete, completion
from tests.frontend.test_plugins import client
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOPS = [
    Hop("queue", 1e-6, 1e-6, "prefill-0"),
    Hop("prefill", 2e-6, 1e-6, "prefill-0"),
    Hop("first-step", 3e-6, 1e-6),
]
REMOTE_HOPS = ["queue prefill-0", "prefill prefill-0"]


def newest(graph: Graph) -> Receipt:
    (receipt,) = graph.plugins.receipts(1)
    return receipt


def way(receipt: Receipt) -> list[str]:
    """Return each hop's name, instance and reason, in order."""
    assert all(early.start <= late.start for early, late in pairwise(receipt.hops))
    assert all(hop.start >= 0 and hop.start + hop.seconds <= receipt.seconds + 0.02 for hop in receipt.hops)
    assert {hop.name for hop in receipt.hops} <= set(reports.HOPS)
    return [" ".join(filter(None, (hop.name, hop.instance, hop.why))) for hop in receipt.hops]


def remote(worker: EchoWorker, reason: str = "long") -> None:
    worker.placed = replace(worker.placed, prefill="remote", reason=reason, cached=3, hops=HOPS)


def histograms() -> list[float]:
    return [counted(f"pdserve_{name}_seconds_count") for name in ("ttft", "e2e")]


async def test_receipt_and_headers_have_each_hop(
    graph: Graph,
) -> None:
    named = {"x-request-id": "my-id.7"}
    async with graph.worker() as worker:
        remote(worker, reason='l"o\r\nx: y')
        whole = await complete(graph, headers=named)
        stream = await complete(graph, stream=True, headers=named)
        wrong = await complete(graph, temperature=-1)
    _, _, receipt = graph.plugins.receipts(3)
    assert way(receipt) == ["admission", *REMOTE_HOPS, f"first-step {worker.id}", f"decode {worker.id}"]
    assert receipt.hops[1].start >= HOPS[0].start + receipt.hops[0].start + receipt.hops[0].seconds
    assert (receipt.request_id, receipt.frontend) == ("my-id.7", "frontend-0-test")
    assert (receipt.status, receipt.error, receipt.running) == (200, "", False)
    assert (receipt.prefill, receipt.reason, receipt.instances) == ("remote", 'l"o\r\nx: y', [worker.id])
    assert (receipt.prompt_tokens, receipt.output_tokens) == (len(PROMPT), 8)
    assert receipt.ttft is not None
    assert 0 < receipt.ttft < receipt.seconds <= receipt.age
    for answer in (whole, stream):
        assert answer.headers.get_list("x-request-id") == ["my-id.7"]
        names = ("prefill", "instance", "reason", "cached-tokens", "retries")
        given = [answer.headers[f"x-pdserve-{name}"] for name in names]
        assert given == ["remote", worker.id, "l?o??x: y", "0", "0"]
    assert "my-id.7" in worker.seen[0].request_id
    told = r'admission;dur=\d+\.\d\d, queue;dur=0.00;desc="prefill-0", prefill;dur=0.00;desc="prefill-0", '
    told += rf'first-step;dur=0.00;desc="{worker.id}"'
    assert re.fullmatch(told, stream.headers["server-timing"])
    assert re.fullmatch(rf'{told}, decode;dur=\d+\.\d\d;desc="{worker.id}"', whole.headers["server-timing"])
    assert re.fullmatch(r"admission;dur=\d+\.\d\d", wrong.headers["server-timing"])
    assert "x-pdserve-prefill" not in wrong.headers


async def test_the_receipt_of_a_request_that_migrates_has_both_workers(graph: Graph) -> None:
    before = histograms()
    async with graph.worker(pace=None) as first:
        remote(first)
        request = post(graph, max_tokens=6)
        await steps(first, 2)
        await until(lambda: newest(graph).output_tokens == 2)
        receipt = newest(graph)
        assert (receipt.running, receipt.status, receipt.hops[-1].name) == (True, 0, "decode")
        await first.die()
        await until(lambda: newest(graph).retries == 1)
        await until(lambda: newest(graph).hops[-1].why == "no decode worker is available")
        async with graph.worker() as second:
            await request
    await until(lambda: not newest(graph).running)  # the client may have the response a moment earlier
    receipt = newest(graph)
    lost = ["admission", *REMOTE_HOPS, f"first-step {first.id}", f"decode {first.id}"]
    moved = [f"migration {first.id} {first.id} is gone", "admission no decode worker is available"]
    assert way(receipt) == [*lost, *moved, f"decode {second.id}"]
    assert (receipt.retries, receipt.instances, receipt.prefill) == (1, [first.id, second.id], "local")
    assert (receipt.prompt_tokens, receipt.output_tokens) == (len(PROMPT), 6)
    assert histograms() == [count + 1 for count in before]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_499_and_its_request_ends_at_the_worker(
    graph: Graph, stream: bool
) -> None:
    ttft, e2e = histograms()
    async with graph.worker(pace=None) as worker:
        request = post(graph, stream=stream)
        await steps(worker, 1)
        request.cancel()
        await worker.until(lambda: worker.cancelled)
        assert (worker.cancelled, worker.jobs) == ([worker.seen[0].request_id], {})
        await until(lambda: not newest(graph).running)
    receipt = newest(graph)
    assert receipt.error == "the client left"
    assert receipt.status == 499 or stream, "a begun stream has sent its status"
    assert [hop.name for hop in receipt.hops] == ["admission", "decode"]
    assert histograms() == [ttft + 1, e2e]


async def test_a_receipt_quotes_no_request_and_at_most_300_characters_of_failures(graph: Graph) -> None:
    secret = "SECRET"
    async with graph.worker() as worker:
        for body, status in [
            (completion(temperature=secret), 400),
            (completion(structured_outputs=secret), 400),
            (completion(model=secret), 404),
        ]:
            answer = await graph.http.post("/v1/completions", json=body)
            receipt = newest(graph)
            assert answer.status_code == receipt.status == status
            assert receipt.error == ""
            assert secret not in str(receipt)
        worker.fail = Failed("", "x" * 10_000)
        answer = await complete(graph)
        receipt = newest(graph)
        assert answer.status_code == receipt.status == 500
        assert receipt.error == "x" * 300


async def test_receipts_are_bounded_in_number_and_age(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = receipts.Receipts(graph.context)
    monkeypatch.setattr(graph.plugins, "plugins", [kept])
    monkeypatch.setattr(kept, "_over", type(kept._over)(maxlen=3))
    async with graph.worker():
        for number in range(5):
            headers = {"x-request-id": f"r-{number % 4}"}
            await complete(graph, max_tokens=number + 1, headers=headers)
    assert [receipt.request_id for receipt in kept.receipts(9)] == ["r-0", "r-3", "r-2"]
    assert [receipt.output_tokens for receipt in kept.receipts(1, request_id="r-0")] == [5]
    monkeypatch.setattr(receipts, "RECEIPT_LIFETIME", 0.0)
    assert kept.receipts(9) == []


async def test_a_tick_counts_requests_tokens_and_latencies(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = receipts.Receipts(graph.context)
    monkeypatch.setattr(graph.plugins, "plugins", [kept])
    monkeypatch.setattr(receipts, "TICK", 0.01)
    ticking = asyncio.create_task(kept.tick())
    async with graph.worker() as worker:
        await post(graph)
        await post(graph, temperature=-1)
        worker.fail = Failed("", "it broke")
        await post(graph)
        await until(lambda: sum(tick.requests for tick in kept.add_to_report(ProcessReport()).ticks) == 3)
    ticking.cancel()
    ticks = kept.add_to_report(ProcessReport()).ticks
    sums = {name: sum(getattr(tick, name) for tick in ticks) for name in ("failed", "refused", "tokens")}
    assert sums == {"failed": 1, "refused": 0, "tokens": 8}
    assert [sum(sum(tick.ttft) for tick in ticks), sum(sum(tick.itl) for tick in ticks)] == [1, 7]
    assert {len(tick.ttft) for tick in ticks} <= {0, len(reports.BUCKETS) + 1}


@asynccontextmanager
async def other_frontend(graph: Graph, kept: list[Receipt]) -> AsyncIterator[list[tuple[object, ...]]]:
    """Register another frontend with these receipts. Yield the arguments of each question for them."""
    asked: list[tuple[object, ...]] = []

    def tell(limit: int, key: str | None, request_id: str) -> list[Receipt]:
        asked.append((limit, key, request_id))
        return [told for told in kept if key in (None, told.key) and request_id in ("", told.request_id)]

    with serve_pages("127.0.0.1") as page:
        page.receipts = tell
        instance = Instance("frontend-1-test", Role.FRONTEND, metrics=page.metrics)
        async with MemoryRegistry(graph.registry) as registry:
            await registry.put(keys.instance(instance), encode_record(instance))
            await until(lambda: instance in graph.context.view.instances(Role.FRONTEND))
            yield asked


async def test_requests_are_listed_and_found_at_any_frontend(graph: Graph) -> None:
    there = Receipt("there", "frontend-1-test", "/v1/completions", 0.0)
    async with graph.worker(), other_frontend(graph, [there]) as asked:
        await complete(graph, headers={"x-request-id": "here"})
        here = (await graph.http.get("/requests/here")).json()
        assert asked == [], "this frontend has the receipt"
        assert (here["request_id"], here["frontend"], here["status"]) == ("here", "frontend-0-test", 200)
        assert [hop["name"] for hop in here["hops"]] == ["admission", "decode"]
        found = await graph.http.get("/requests/there")
        assert msgspec.json.decode(found.content, type=Receipt) == there
        missing = await graph.http.get("/requests/nowhere")
        assert missing.status_code == 404
        assert "for 15 minutes" in missing.json()["error"]["message"]
        told = (await graph.http.get("/requests", params={"limit": 100})).json()["data"]
        assert [receipt["request_id"] for receipt in told[:2]] == ["there", "here"]
        assert len((await graph.http.get("/requests?limit=1")).json()["data"]) == 1
        for limit in ("0", "-1", "x", "101", "9" * 99, "", "000000001" + "9" * 5000):
            assert (await graph.http.get("/requests", params={"limit": limit})).status_code == 400, limit
        assert (await graph.http.post("/requests")).status_code == 405


async def test_a_key_sees_its_own_receipts(graph: Graph) -> None:
    known = [ApiKey.of("one", "alice"), ApiKey.of("two", "bob"), ApiKey.of("three", "root", admin=True)]
    app = graph.app_with(ApiKeys(known))
    there = [Receipt(f"of-{name}", "f", "/v1/completions", 1e6, key=name) for name in ("alice", "bob")]
    bearer = {key: {"authorization": f"Bearer {key}"} for key in ("one", "two", "three")}
    async with graph.worker(), other_frontend(graph, there), client(app) as http:
        for key, tokens in (("one", 1), ("two", 2)):
            headers = {**bearer[key], "x-request-id": "same"}
            await http.post("/v1/completions", json=completion(max_tokens=tokens), headers=headers)

        async def seen(key: str) -> list[tuple[str, str]]:
            data = (await http.get("/requests", headers=bearer[key])).json()["data"]
            return [(told["request_id"], told["key"]) for told in data]

        assert await seen("one") == [("same", "alice"), ("of-alice", "alice")]
        assert await seen("two") == [("same", "bob"), ("of-bob", "bob")]
        assert {name for _, name in await seen("three")} == {"alice", "bob"}
        assert (await http.get("/requests/of-bob", headers=bearer["one"])).status_code == 404
        assert (await http.get("/requests/of-bob", headers=bearer["three"])).json()["key"] == "bob"
        for key, tokens in (("one", 1), ("two", 2), ("three", 2)):
            receipt = (await http.get("/requests/same", headers=bearer[key])).json()
            assert receipt["output_tokens"] == tokens, key
        assert (await http.get("/requests")).status_code == 401
        refused = await http.post("/v1/completions", json=completion())
        assert refused.status_code == 401
        assert refused.headers["x-request-id"] not in {name for name, _ in await seen("three")}


async def test_wrong_values_from_a_worker_are_bounded(graph: Graph) -> None:
    nan, infinite = float("nan"), float("inf")
    wrong = [
        Hop("prefill", nan, infinite, "i" * 1000, "w" * 1000),
        Hop("queue", -5.0, nan),
        Hop("x\r\n" * 1000, 0.0),
        *[Hop("transfer", infinite, 1e300)] * 1000,
    ]
    async with graph.worker() as worker:
        worker.placed = replace(worker.placed, prefill="☃\r\nx: y", reason="r" * 10_000, hops=wrong)
        answer = await complete(graph)
        found = await graph.http.get("/requests?limit=1")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pdserve-prefill"] == "unknown"
    assert len(answer.headers["x-pdserve-reason"]) == 300
    (receipt,) = msgspec.json.decode(msgspec.json.encode(found.json()["data"]), type=list[Receipt])
    assert {hop.name for hop in receipt.hops} <= set(reports.HOPS)
    assert len(receipt.hops) < 40
    assert all(0 <= hop.start < 2e6 and 0 <= hop.seconds <= 1e6 for hop in receipt.hops)
    assert max(len(hop.instance) + len(hop.why) for hop in receipt.hops) == 600


async def test_several_sequences_are_one_request_with_the_hops_of_the_first(graph: Graph) -> None:
    async def counts(request: Awaitable[object]) -> list[float]:
        before = histograms()
        await request
        await until(lambda: not newest(graph).running)  # the client may have the response a moment earlier
        return [late - early for early, late in zip(before, histograms(), strict=True)]

    batch = chat(messages=[chat()["messages"]] * 2)
    async with graph.worker() as worker:
        remote(worker)
        for path, body, prompts, outputs in (
            ("/v1/completions", completion(n=3, temperature=1.0), 1, 3),
            ("/v1/completions", completion(prompt=[PROMPT, PROMPT], stream=True), 2, 2),
            ("/v1/chat/completions/batch", batch, None, 2),
        ):
            assert await counts(graph.http.post(path, json=body)) == [1, 1]
            receipt = newest(graph)
            names = [hop.name for hop in receipt.hops]
            assert names == ["admission", "queue", "prefill", "first-step", "decode"]
            assert receipt.output_tokens == 8 * outputs
            assert prompts is None or receipt.prompt_tokens == prompts * len(PROMPT)
        assert await counts(post(graph, temperature=-1)) == [0, 0]
        worker.script = [Step([5]), Step([], FinishReason.ERROR)]
        assert await counts(post(graph, stream=True, max_tokens=9)) == [1, 0], "failed after too many losses"


async def test_links_and_metrics_show_a_lost_worker(graph: Graph) -> None:
    def value(name: str, **labels: str) -> float:
        return counted(f"pdserve_{name}", model="linked", **labels)

    def links() -> dict[str, reports.LinkState]:
        return {link.to: link for link in graph.models.links()}

    async with graph.worker("linked", pace=None) as first:
        request = post(graph, model="linked", n=2, temperature=1.0)
        await first.until(lambda: len(first.jobs) == 2)
        assert value("running_requests") == 2
        up = reports.LinkState(first.id, "requests", requests=2)
        assert replace(links()[first.id], round_trip=None) == up
        assert (value("links", state="up"), value("links", state="down")) == (1, 0)
        await first.die()
        await until(lambda: value("links", state="down") == 1)
        lost = links()[first.id]
        assert (lost.up, lost.requests, lost.failure) == (False, 0, f"{first.id} is gone")
        assert lost.failures >= 1
        assert (value("running_requests"), value("migrations_total", reason="gone")) == (0, 2)
        async with graph.worker("linked") as second:
            await request
            second.fail = Failed("", "no", retry=True)
            request = post(graph, model="linked")
            await until(lambda: value("migrations_total", reason="failed") >= 1)
            second.fail = None
            await request
    await until(lambda: first.id not in links())
