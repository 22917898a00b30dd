"""Addressed prompts: sent past the queue to one prefill worker, because it has their prefixes cached."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.contract.messages import RETURNED, PrefillFailed, PrefillRequest
from pdserve.contract.records import WIRE, Instance, Role, encode_record
from pdserve.prefill.pull_policy import PULL_WAIT
from pdserve.queue.base import Delivery
from pdserve.util.errors import QueueUnavailable
from tests.conditions import holds, until
from tests.engine.sims import LOADED, body
from tests.prefill.test_worker import PROMPT, Scene

DECODE = encode_record(Instance("decode-0", Role.DECODE, "demo", wire=WIRE, fingerprint=LOADED))


async def address(scene: Scene, request_id: str, prompt: list[int] = PROMPT, **changes: Any) -> None:
    asked: dict[str, Any] = {
        "timeout": 30.0,
        "block_size": 16,
        "body": body(),
        "begin_within": 20.0,
    } | changes
    await scene.decode.address("prefill-0", PrefillRequest(request_id, "decode-0", prompt, **asked))


def begun(scene: Scene) -> list[str]:
    return [running.request.request_id for running in scene.worker._prompts._running]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with Scene() as scene:
        yield scene


@pytest.fixture
async def full() -> AsyncIterator[Scene]:
    """A worker whose engine has room for one prompt at a time, and is stopped while it computes "first"."""
    async with Scene(max_num_batched_tokens=128) as scene:
        scene.engine.faults.going.clear()
        await scene.ask("first", prompt=list(range(1000, 1200)))
        await until(lambda: begun(scene) == ["first"])
        yield scene


def waiting(scene: Scene) -> int:
    return len(scene.worker._prompts.pulling.addressed)


async def order(scene: Scene, count: int) -> list[str]:
    """Let the engine go on; return the order in which prompts began."""
    scene.engine.faults.going.set()
    await until(lambda: len(scene.answers) >= count + 1)
    return [name for name in scene.started if name != "first"]


async def test_an_idle_worker_begins_an_addressed_prompt_at_once_and_continues_to_pull(scene: Scene) -> None:
    await holds(lambda: scene.worker._prompts.pulling._waiting is not None, 0.05)
    await address(scene, "mine")
    assert (await scene.done("mine")).handle.engine_id == "prefill-0"
    await scene.ask("queued")
    assert await scene.done("queued")


async def test_an_addressed_prompt_does_not_wait_for_the_end_of_a_pull() -> None:
    """While the worker waits at the queue, the running prompt's KV fills the cache."""
    async with Scene(max_num_batched_tokens=256, num_gpu_blocks_override=40) as scene:
        pulling = scene.worker._prompts.pulling
        await until(lambda: pulling._waiting is not None)
        scene.engine.faults.going.clear()
        await address(scene, "first")
        await until(lambda: begun(scene) == ["first"] and not pulling._has_capacity())
        assert pulling._waiting is not None
        await address(scene, "second", list(range(2000, 2200)))
        await until(lambda: waiting(scene) == 1)
        scene.engine.faults.going.set()
        await until(lambda: "second" in scene.started, within=PULL_WAIT / 2)


async def test_addressed_and_queued_prompts_take_turns(full: Scene) -> None:
    for number in range(2):
        await address(full, f"mine-{number}", list(range(2000 + number, 2200 + number)))
        await full.ask(f"queued-{number}", list(range(3000 + number, 3200 + number)))
    await until(lambda: waiting(full) == 2)
    found = await order(full, 4)
    assert sorted(found[:2]) == ["mine-0", "queued-0"]
    assert sorted(found[2:]) == ["mine-1", "queued-1"]


async def test_small_addressed_prompts_begin_before_the_next_pull(full: Scene) -> None:
    """Their turn lasts until they have as many tokens as the last pulled prompt; the next one's length is unknown."""
    for number in range(2):
        await full.ask(f"queued-{number}", list(range(3000 + number, 3200 + number)))
    for number in range(4):
        await address(full, f"mine-{number}", list(range(2000 + number, 2090 + number)))
    await until(lambda: waiting(full) == 4)
    assert await order(full, 6) == ["mine-0", "mine-1", "mine-2", "queued-0", "mine-3", "queued-1"]


async def test_addressed_prompts_do_not_wait_for_a_queue_that_fails(
    full: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream may be without a leader while NATS still delivers messages."""

    async def fail(*_: object) -> list[Delivery]:
        raise QueueUnavailable("no leader")

    monkeypatch.setattr(full.worker._queue, "pull", fail)
    for number in range(3):
        await address(full, f"mine-{number}", list(range(2000 + number, 2200 + number)))
    await until(lambda: waiting(full) == 3)
    assert await order(full, 3) == ["mine-0", "mine-1", "mine-2"]


async def test_clients_have_turns_and_flex_prompts_come_last(full: Scene) -> None:
    for name, client in (("flex", "~b"), ("greedy-0", "a"), ("greedy-1", "a"), ("honest", "c")):
        await address(full, name, [ord(name[0]), *range(2000, 2200), len(name)], client=client)
    await until(lambda: waiting(full) == 4)
    assert await order(full, 4) == ["greedy-0", "honest", "greedy-1", "flex"]


async def test_a_prompt_is_never_begun_too_late(full: Scene) -> None:
    await address(full, "late", begin_within=0.05)
    await address(full, "in time", list(range(2000, 2200)))
    await until(lambda: waiting(full) == 2)
    await asyncio.sleep(0.06)
    assert await order(full, 1) == ["in time"]
    assert "late" not in full.answers


async def test_a_cancelled_prompt_is_never_begun(full: Scene) -> None:
    await address(full, "cancelled")
    await until(lambda: waiting(full) == 1)
    await full.decode.cancel(["cancelled"])
    await until(lambda: waiting(full) == 0)


async def test_a_drain_returns_the_waiting_prompts(full: Scene) -> None:
    await address(full, "mine")
    await until(lambda: waiting(full) == 1)
    full.worker.stop()
    returned = await full.answer("mine")
    assert isinstance(returned, PrefillFailed)
    assert returned.reason == RETURNED
    await address(full, "later", list(range(2000, 2200)))
    assert isinstance(await full.answer("later"), PrefillFailed)


async def test_the_reported_load_leaves_out_cached_tokens(full: Scene) -> None:
    await address(full, "mine", list(range(2000, 2300)))
    await until(lambda: full.decode.loads["prefill-0"][0].tokens == 200 + 300)
    full.engine.faults.going.set()
    await full.done("mine")
    full.engine.faults.going.clear()
    await full.ask("other", list(range(5000, 5200)))
    await until(lambda: begun(full) == ["other"])
    await address(full, "again", list(range(2000, 2300)))
    await until(lambda: full.decode.loads["prefill-0"][0].tokens == 200 + 300 - 288)
    full.engine.faults.going.set()
    await full.done("other")
    await full.done("again")


async def test_nothing_is_reported_until_a_prompt_finds_a_prefix(scene: Scene) -> None:
    await scene.other.put("instances/decode/decode-0", DECODE)
    reports = aiter(scene.decode.prefixes())
    first = asyncio.ensure_future(anext(reports))
    await scene.ask("a")
    await scene.done("a")
    await holds(lambda: not first.done(), 0.6)
    await scene.ask("b", [*PROMPT, *range(900, 940)])
    report = await asyncio.wait_for(first, 5)
    assert (report.worker, report.changed.whole) == ("prefill-0", True)
    assert len(report.changed.stored) == 240 // 16
    await scene.ask("c", list(range(5000, 5032)))
    later = await asyncio.wait_for(anext(reports), 5)
    assert (len(later.changed.stored), later.changed.whole) == (2, False)
    scene.worker._prompts.prefix_reports.last_hit = time.monotonic() - 61
    await scene.ask("d", list(range(6000, 6032)))
    await scene.done("d")
    await asyncio.sleep(0.3)
    assert scene.engine.prefixes.changes("decode workers") == ([], []), "nothing is collected"
