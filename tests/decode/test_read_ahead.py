"""KV that is read while the rest of its prompt is computed: what the workers say and do, on simulated engines. That
nothing is believed before the prefill is done is the connector's (`tests/kv/test_ahead.py`, `tests/engine`)."""

import msgspec
import pytest
from prometheus_client import REGISTRY

from pdserve.kv.ahead import PIECE
from pdserve.messages import KvHandle, PrefillDone, PrefillFailed, PrefillProgress
from tests.conditions import until
from tests.decode.graph import Prefill, WorkerGraph
from tests.decode.test_worker import LONG, act_prefill, expected, handle, pulled

PER_TOKEN = PIECE // 64
"""bytes: a step of 64 tokens is worth a read"""
BLOCK = 16


async def chunked(graph: WorkerGraph, chunk: int = 64) -> Prefill:
    arguments: dict[str, object] = {"max-num-batched-tokens": chunk, "bytes-per-token": PER_TOKEN}
    return await graph.prefill("prefill-0", **arguments)  # type: ignore[arg-type]


def moved() -> float:
    return REGISTRY.get_sample_value("pdserve_kv_transfer_bytes_total", {"model": "demo"}) or 0.0


def part(tokens: int, **changes: object) -> KvHandle:
    return handle(LONG[:tokens], computed_at=float("-inf"), **changes)


@pytest.mark.parametrize(("chunk", "left"), [(64, 64), (200, 116), (500, 512)])
async def test_only_the_last_blocks_are_left_to_read_when_the_prefill_is_done(chunk: int, left: int) -> None:
    """Of 500 tokens in blocks of 16, after the last step that was not the prompt's last."""
    async with WorkerGraph() as graph:
        await chunked(graph, chunk)
        before = moved()
        answered = await (await graph.frontend()).ask(LONG)
        assert answered.tokens == expected(LONG, 4)
        assert answered.way[0] == "remote"
        bytes_per_token = 4096  # of the decode engine
        assert (moved() - before) // bytes_per_token // BLOCK == left // BLOCK
        await until(graph.decode_engine.all_blocks_free)


async def test_a_cancelled_prefill_leaves_nothing_of_what_was_read() -> None:
    async with WorkerGraph() as graph:
        prefill = await chunked(graph)
        prefill.engine.faults.slow = 50.0
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await until(lambda: holds_ahead(graph, request_id))
        assert not await graph.decode_engine.all_blocks_free()
        await frontend.cancel(request_id)
        await until(graph.decode_engine.all_blocks_free)
        await until(prefill.engine.all_blocks_free)


def holds_ahead(graph: WorkerGraph, request_id: str) -> bool:
    request = graph.decode.requests.get(request_id)
    return request is not None and request.ahead is not None


async def test_a_prefill_that_fails_leaves_nothing_of_what_was_read() -> None:
    async with pulled() as (graph, queue, frontend, request_id):
        await queue.answer("decode-0", PrefillProgress(request_id, part(64)))
        await until(lambda: holds_ahead(graph, request_id))
        await queue.answer("decode-0", PrefillFailed(request_id, "engine"))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert await graph.decode_engine.all_blocks_free()
        await queue.answer("decode-0", PrefillProgress(request_id, part(128)))
        await queue.answer("decode-0", PrefillProgress("unknown", part(128)))
        await frontend.ask(LONG[:20])
        assert await graph.decode_engine.all_blocks_free()


async def test_another_workers_answer_ends_what_was_read_of_the_first() -> None:
    """The request was delivered again."""
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        await act_prefill(graph, "prefill-y")
        queue, frontend = await graph.queue(), await graph.frontend()
        request_id = await frontend.submit(LONG)
        await queue.pull(1, 5.0)
        await queue.answer("decode-0", PrefillProgress(request_id, part(64)))
        await queue.answer("decode-0", PrefillProgress(request_id, part(64, engine_id="prefill-y")))
        await until(lambda: holds_ahead(graph, request_id))
        other = handle(LONG, request_id="q")  # its KV cannot be read: nothing listens there
        await queue.answer("decode-0", PrefillDone(request_id, other))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        await until(graph.decode_engine.all_blocks_free)


async def test_nothing_is_read_for_a_request_whose_wait_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        await act_prefill(graph, "prefill-y")
        queue, frontend = await graph.queue(), await graph.frontend()
        request_id = await frontend.submit(LONG)
        await queue.pull(1, 5.0)
        request, dropped = graph.decode.requests.get(request_id), graph.decode_engine.drop_ahead
        assert request is not None

        async def drop_slowly(kv: KvHandle) -> None:
            await dropped(kv)
            if request.awaits:
                request.resolve("timeout")
                await until(lambda: not graph.decode.requests)

        monkeypatch.setattr(graph.decode_engine, "drop_ahead", drop_slowly)
        await queue.answer("decode-0", PrefillProgress(request_id, part(64)))
        await queue.answer("decode-0", PrefillProgress(request_id, part(64, engine_id="prefill-y")))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        await until(graph.decode_engine.all_blocks_free)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 32},
        {"block_ids": [[1, 1, 2, 3]]},
        {"block_ids": [[-1, 1, 2, 3]]},
        {"fingerprint": "of other weights"},
        {"engine_id": "prefill-of-an-earlier-boot"},
        {"host": ""},
        {"num_tokens": 512, "block_ids": [list(range(32))]},
    ],
)
async def test_kv_of_a_wrong_handle_is_not_read_ahead(changes: dict[str, object]) -> None:
    async with pulled() as (graph, queue, frontend, request_id):
        bad = msgspec.structs.replace(part(64), **changes)
        request = graph.decode.requests.get(request_id)
        assert request is not None
        await queue.answer("decode-0", PrefillProgress(request_id, bad))
        await queue.answer("decode-0", PrefillFailed(request_id, "engine"))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert request.ahead is None
