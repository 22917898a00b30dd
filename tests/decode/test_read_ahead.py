"""Workers on simulated engines read a prompt's KV while the rest of the prompt is computed. `tests/kv/read_ahead` and
`tests/engine` test that the KV is used only after the prefill is done."""

import msgspec
import pytest

from pdserve.contract.messages import KvHandle, PrefillDone, PrefillFailed, PrefillProgress
from pdserve.kv.read_ahead.blocks import MIN_PIECE_BYTES
from tests.conditions import until
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, Prefill, WorkerGraph, counted, handle

PER_TOKEN = MIN_PIECE_BYTES // 64
"""Bytes of a token's KV, so large that the KV of 64 tokens is just worth a read."""
BLOCK = 16


async def chunked(graph: WorkerGraph, chunk: int = 64) -> Prefill:
    arguments: dict[str, object] = {"max-num-batched-tokens": chunk, "bytes-per-token": PER_TOKEN}
    return await graph.prefill("prefill-0", **arguments)  # type: ignore[arg-type]


def part(tokens: int, **changes: object) -> KvHandle:
    return handle(LONG[:tokens], **changes)


@pytest.mark.parametrize(("chunk", "left"), [(64, 64), (200, 112), (500, 512)])
async def test_only_the_last_blocks_are_left_to_read_when_the_prefill_is_done(
    graph: WorkerGraph, frontend: FrontendStream, chunk: int, left: int
) -> None:
    """`left`: tokens of the last step, rounded up to blocks of 16."""
    await chunked(graph, chunk)
    before = counted("pdserve_kv_transfer_bytes_total")
    assert (await frontend.ask(LONG)).way[0] == "remote"
    bytes_per_token = 4096  # of the decode engine
    moved = counted("pdserve_kv_transfer_bytes_total") - before
    assert moved // bytes_per_token // BLOCK == left // BLOCK
    await graph.frees_all()


def holds_ahead(graph: WorkerGraph) -> bool:
    return any(request.read_ahead is not None for request in graph.decode.requests)


def delivered_twice(request_id: str) -> list[PrefillProgress]:
    """Reports of two prefill workers for one request."""
    return [PrefillProgress(request_id, part(64, engine_id=f"prefill-{name}")) for name in "xy"]


@pytest.mark.parametrize("end", ["it is cancelled", "it fails", "another worker answers"])
async def test_blocks_that_were_read_ahead_are_freed_at_every_end(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, pulled: str, end: str
) -> None:
    await graph.act_prefill("prefill-y")
    await acted.answer(*delivered_twice(pulled))
    await until(lambda: holds_ahead(graph))
    assert not await graph.decode_engine.all_blocks_free()
    if end == "it is cancelled":
        await frontend.cancel(pulled)
    elif end == "it fails":
        await acted.answer(PrefillFailed(pulled, "engine"))
    else:
        await acted.answer(PrefillDone(pulled, handle(LONG, request_id="q")))  # the handle's port is closed
    await until(lambda: not graph.decode.requests)
    await graph.frees_all()
    await acted.answer(PrefillProgress(pulled, part(128)), PrefillProgress("unknown", part(128)))
    await frontend.ask(LONG[:20])
    assert await graph.decode_engine.all_blocks_free()


async def test_nothing_is_read_for_a_request_whose_wait_ends_meanwhile(
    graph: WorkerGraph,
    acted: ActedPrefill,
    frontend: FrontendStream,
    pulled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await graph.act_prefill("prefill-y")
    request, dropped = graph.request(pulled), graph.decode_engine.drop_ahead

    async def drop_slowly(kv: KvHandle) -> None:
        await dropped(kv)
        if request.awaits_answer:
            request.resolve("timeout")
            await until(lambda: not graph.decode.requests)

    monkeypatch.setattr(graph.decode_engine, "drop_ahead", drop_slowly)
    await acted.answer(*delivered_twice(pulled))
    await frontend.end_of(pulled)
    await graph.frees_all()


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "of other weights"},
        {"engine_id": "prefill-of-an-earlier-boot"},
        {"num_tokens": 512, "block_ids": [list(range(32))]},
    ],
)
async def test_kv_of_a_wrong_handle_is_not_read_ahead(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, pulled: str, changes: dict[str, object]
) -> None:
    bad, request = msgspec.structs.replace(part(64), **changes), graph.request(pulled)
    await acted.answer(PrefillProgress(pulled, bad), PrefillFailed(pulled, "engine"))
    await frontend.end_of(pulled)
    assert request.read_ahead is None


async def test_blocks_only_in_host_memory_are_read_from_the_prefill_worker_too(
    graph: WorkerGraph, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chunked(graph)
    skipped = []

    async def note(kv: KvHandle, skip: int) -> None:
        skipped.append(skip)

    monkeypatch.setattr(graph.decode_engine, "read_ahead", note)
    monkeypatch.setattr(graph.decode_engine.prefixes, "hit", lambda _, host=True: 64 if host else 16)
    assert (await frontend.ask(LONG)).way[0] == "remote"
    assert set(skipped) == {16}
