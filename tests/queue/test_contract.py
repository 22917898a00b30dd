"""The queue's contract while the server is reachable, for both implementations."""

import asyncio
import time
from contextlib import suppress

import msgspec
import pytest

from pdserve.contract.messages import (
    KvHandle,
    PrefillCancel,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillPrefixes,
    PrefixesChanged,
)
from pdserve.queue.depth import Puller
from pdserve.util.errors import QueueFull
from tests.conditions import until
from tests.queue.conftest import ACK_WAIT, BOUND, MAX_DELIVER, Queues
from tests.queue.requests import ids, publish, request


async def test_each_request_is_delivered_unchanged_to_one_worker_in_order(queues: Queues) -> None:
    decode, one, other = await queues(), await queues(), await queues()
    sent = [request(f"r{number}", prompt=3000) for number in range(10)]
    for prompt in sent:
        await decode.publish(prompt)
    first = await one.pull(4, 1)
    rest = await other.pull(20, 1)
    assert [delivery.request for delivery in first + rest] == sent
    assert not any(delivery.redelivered for delivery in first + rest)
    assert all(0 <= delivery.queued < 5 for delivery in first)


async def test_a_warm_up_bypasses_the_queue_to_its_worker(queues: Queues) -> None:
    """It also arrives if it was sent before its worker reads, as may happen when two workers start together."""
    decode, prefill, other = await queues(), await queues(), await queues("another model")
    await other.expect_addressed("prefill-0")
    not_coming = asyncio.ensure_future(anext(other.addressed("prefill-0")))
    sent = msgspec.structs.replace(request("w"), warm_up=True)
    for worker in (f"prefill-{number}" for number in range(20)):
        await prefill.expect_addressed(worker)
        await decode.address("elsewhere", request("x"))
        await decode.address(worker, sent)
        assert await asyncio.wait_for(anext(prefill.addressed(worker)), 30) == sent
    assert decode.depth == 0
    assert await prefill.pull(1, 0.1) == []
    assert not not_coming.done()
    not_coming.cancel()


async def test_all_decode_workers_of_the_model_get_reports_of_prefixes(queues: Queues) -> None:
    one, two, prefill, other = await queues(), await queues(), await queues(), await queues("another model")
    readers = [one.prefixes(), two.prefixes()]
    not_coming = asyncio.ensure_future(anext(other.prefixes()))
    coming = [asyncio.ensure_future(anext(reports)) for reports in readers]
    report = PrefillPrefixes("prefill-0", PrefixesChanged(16, 2, [b"12345678"], [b"87654321"]))
    while not all(each.done() for each in coming):  # they may still be subscribing
        await prefill.report_prefixes(report)
        await asyncio.wait(coming, timeout=0.1)
    assert [each.result() for each in coming] == [report, report]
    assert not not_coming.done()
    not_coming.cancel()


async def test_a_worker_listens_until_it_leaves(queues: Queues, url: str | None, namespace: str) -> None:
    decode, prefill = await queues(), await queues()
    assert not await decode.listens("prefill-0-a")
    await prefill.expect_addressed("prefill-0-a")
    warm_ups = prefill.addressed("prefill-0-a")
    assert await decode.listens("prefill-0-a")
    assert not await decode.listens("prefill-1-b")
    await decode.address("prefill-0-a", request("warm"))
    assert (await anext(warm_ups)).request_id == "warm", "a question is no warm-up"
    await prefill.__aexit__(None, None, None)

    async def has_left() -> bool:
        with suppress(TimeoutError):  # the worker was leaving
            return not await decode.listens("prefill-0-a")
        return False

    await until(has_left)


async def test_held_requests_count_for_all_until_their_process_ends(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.queue.jetstream.held.REPEAT", 0.2)
    monkeypatch.setattr("pdserve.queue.jetstream.held.FORGET", 1.0)
    holder, other, apart = await queues(), await queues(), await queues("another model")
    holder.hold(3)
    assert (holder.depth, holder.stored) == (3, 0)
    await until(lambda: other.depth == 3)
    await publish(other, "r")
    assert (other.depth, other.stored, apart.depth) == (4, 1, 0)
    holder.hold(1)
    await until(lambda: other.depth == 2)
    await holder.__aexit__(None, None, None)
    await until(lambda: other.depth == 1)


async def test_pull_waits_only_for_the_first_request(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    started = time.monotonic()
    pulling = asyncio.create_task(prefill.pull(8, 100))
    await asyncio.wait({pulling}, timeout=0.2)
    await publish(decode, "r")
    assert ids(await pulling) == ["r"]
    assert time.monotonic() - started < 50


async def test_pull_of_an_empty_queue_waits_as_long_as_asked(queues: Queues) -> None:
    prefill = await queues()
    started = time.monotonic()
    assert await prefill.pull(4, 0.2) == []
    assert time.monotonic() - started > 0.15
    assert await prefill.pull(4, 0) == []


async def test_a_request_of_a_silent_worker_is_redelivered(queues: Queues) -> None:
    decode, silent, other = await queues(), await queues(), await queues()
    await publish(decode, "r")
    await silent.pull(1, 1)
    started = time.monotonic()
    (delivery,) = await other.pull(1, 30)
    assert delivery.redelivered
    assert time.monotonic() - started > ACK_WAIT * 0.8


async def test_progress_keeps_a_request_and_an_ack_ends_it(queues: Queues) -> None:
    decode, busy, other = await queues(), await queues(), await queues()
    await publish(decode, "r")
    (delivery,) = await busy.pull(1, 1)
    for _ in range(3):
        assert await other.pull(1, ACK_WAIT / 2) == []
        await delivery.in_progress()
    await delivery.ack()
    assert await other.pull(1, ACK_WAIT + 0.5) == []


async def test_a_request_that_is_given_back_is_redelivered_at_once(queues: Queues) -> None:
    decode, leaving, other = await queues(), await queues(), await queues()
    await publish(decode, "r")
    (delivery,) = await leaving.pull(1, 1)
    await delivery.give_back()
    started = time.monotonic()
    (again,) = await other.pull(1, 5)
    assert again.redelivered
    assert time.monotonic() - started < ACK_WAIT * 0.7


async def test_an_abandoned_pull_keeps_no_request(queues: Queues) -> None:
    """A cancelled pull keeps neither a later request nor one that arrives while it is cancelled."""
    decode, leaving, other = await queues(), await queues(), await queues()
    for number in range(10):
        pulling = asyncio.create_task(leaving.pull(1, 30))
        await asyncio.wait({pulling}, timeout=0.02)
        if number % 2:
            await publish(decode, str(number))  # the request is on its way to `leaving`, or there
        pulling.cancel()
        await asyncio.wait({pulling})
        if not number % 2:
            assert pulling.cancelled()
            await publish(decode, str(number))
        (delivery,) = await other.pull(1, ACK_WAIT / 2) if pulling.cancelled() else pulling.result()
        assert delivery.request.request_id == str(number)
        assert number % 2 or not delivery.redelivered
        await delivery.ack()


async def test_a_request_that_kills_its_workers_is_dropped(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    await publish(decode, "poison")
    for _ in range(MAX_DELIVER):
        (delivery,) = await prefill.pull(1, 2)
        await delivery.give_back()
    assert await prefill.pull(1, 0.5) == []


async def test_requests_past_their_deadline_are_dropped(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    await decode.publish(request("late", deadline=-0.1))
    await publish(decode, "in time")
    assert ids(await prefill.pull(2, 1)) == ["in time"]


async def test_requests_are_cancelled_while_queued_and_while_running(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    cancels = prefill.notices()
    await prefill.pull(1, 0)
    await publish(decode, "a", "b")
    await decode.cancel(["a"])
    assert await anext(cancels) == PrefillCancel(["a"])
    assert ids(await prefill.pull(2, 1)) == ["b"]
    await decode.cancel(["b", "unknown"])
    assert await anext(cancels) == PrefillCancel(["b", "unknown"])


async def test_answers_reach_the_worker_that_asked(queues: Queues) -> None:
    first, other, prefill = await queues(), await queues(), await queues()
    handle = KvHandle("prefill-0-x", "r-1", "127.0.0.1", 5600, [[1, 2]], 20, 16, extra={"remote": True})
    to_first, to_other = first.answers("decode-0-a"), other.answers("decode-0.b")
    await publish(first, "first")
    await publish(other, "second")
    await prefill.answer("decode-0.b", PrefillFailed("second", "engine"))
    await prefill.answer("decode-0-a", PrefillDone("first", handle, 0.5))
    assert await anext(to_first) == PrefillDone("first", handle, 0.5)
    assert await anext(to_other) == PrefillFailed("second", "engine")


async def test_depth_is_known_without_asking(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    await publish(decode, "a", "b", "c")
    assert decode.depth == 3
    (first,) = await prefill.pull(1, 1)
    await until(lambda: decode.depth == 2)
    await prefill.pull(5, 1)
    await until(lambda: decode.depth == 0)
    await first.give_back()
    await prefill.pull(1, 1)
    await publish(decode, "d")
    assert decode.depth == 1
    late = await queues()
    assert late.depth == 1


async def test_queued_requests_past_their_deadline_do_not_count(queues: Queues) -> None:
    """Requests of a lost decode worker, which withdraws nothing, do not count either."""
    lost, decode, prefill = await queues(), await queues(), await queues()
    for name in ("a", "b"):
        await lost.publish(request(name, deadline=1.0))
    await publish(decode, "c")
    await lost.__aexit__(None, None, None)
    late = await queues()
    assert late.depth == 3
    await until(lambda: late.depth == decode.depth == 1)
    assert ids(await prefill.pull(5, 1)) == ["c"]
    await until(lambda: decode.depth == 0)


async def test_prefill_workers_report_their_load_with_each_pull(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    assert decode.loads == {}
    await publish(decode, "a", "b")
    await prefill.pull(2, 1, Puller("prefill-0", lambda: PrefillLoad(100, 0.5)))
    await until(lambda: "prefill-0" in decode.loads)
    load, heard = decode.loads["prefill-0"]
    assert load == PrefillLoad(108, 0.5)
    assert 0 <= time.monotonic() - heard < 5
    await publish(decode, "c")
    await prefill.pull(1, 1)
    await until(lambda: decode.depth == 0)
    assert list(decode.loads) == ["prefill-0"]


async def test_a_full_queue_refuses_requests(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    await publish(decode, *(f"r{number}" for number in range(BOUND)))
    with pytest.raises(QueueFull, match=r"full|maximum messages"):
        await publish(decode, "one too many")
    (delivery,) = await prefill.pull(1, 1)
    await delivery.ack()

    async def fits() -> bool:
        with suppress(QueueFull):
            await publish(decode, "fits again")
            return True
        return False

    await until(fits)


async def test_publishing_again_stores_nothing_twice(queues: Queues) -> None:
    decode, prefill = await queues(), await queues()
    await publish(decode, "r", "r")
    assert ids(await prefill.pull(5, 1)) == ["r"]
