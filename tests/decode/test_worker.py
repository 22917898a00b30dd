"""The decode worker among simulated engines: where prompts are prefilled, and what happens when that goes
wrong."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from pdserve.decode import prefill_workers
from pdserve.engine.base import Output
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.model import SimModel
from pdserve.errors import EngineDead, ProtocolError, QueueUnavailable
from pdserve.kv.handles import LEASE_MARGIN
from pdserve.messages import (
    Failed,
    Hello,
    KvHandle,
    Load,
    Outputs,
    Placed,
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    PrefillStarted,
    ToFrontend,
    WorkerLoad,
)
from pdserve.records import Instance, Role, decode_card, decode_instance, encode_record
from pdserve.registry.view import RegistryView
from pdserve.stream.archives import archive_name, fetch, pack_model
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import holds, until
from tests.decode.graph import FrontendStream, WorkerGraph
from tests.engine.sims import FAST, LOADED, body, collect, sim
from tests.memory.queue import MemoryQueue
from tests.memory.registry import MemoryRegistry

SHORT = list(range(3, 23))
LARGE = list(range(3, 33))
LONG = list(range(103, 603))


def expected(prompt: list[int], count: int) -> list[int]:
    """What any healthy engine says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SimModel().next_token(tokens))
    return tokens[len(prompt) :]


def failures(reason: str) -> float:
    name = "pdserve_remote_prefill_failures_total"
    return REGISTRY.get_sample_value(name, {"model": "demo", "reason": reason}) or 0.0


async def test_short_prompts_are_prefilled_here_and_long_ones_elsewhere() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        frontend = await graph.frontend()
        count, labels = "pdserve_kv_transfer_bytes_total", {"model": "demo"}
        bytes_before = REGISTRY.get_sample_value(count, labels) or 0.0
        short, long = await frontend.ask(SHORT), await frontend.ask(LONG)
        assert short.way == ("local", "short")
        assert long.way == ("remote", "long")
        assert short.tokens == expected(SHORT, 4)
        assert long.tokens == expected(LONG, 4)
        assert REGISTRY.get_sample_value(count, labels) == bytes_before + 32 * 16 * 4096
        again = await frontend.ask(LONG)
        assert again.way[1] == "short", "the prefix is cached by now"
        assert again.tokens == long.tokens
        await until(prefill.engine.all_blocks_free)
        await until(graph.decode_engine.all_blocks_free)


LIMIT = 30_000
"""bytes of a message"""


class TensorEngine(SimEngine):
    """With its outputs it sends tensors, as those of logprobs: a third of a message for each, and more than a message
    for one prompt."""

    def pack(self, outputs: list[Output]) -> list[bytes]:
        share = sum(
            2 * LIMIT
            if output.raw.prefill_stats and output.raw.prefill_stats.num_prompt_tokens == len(LARGE)
            else LIMIT // 3
            for output in outputs
        )
        return [*super().pack(outputs), bytes(share)]


async def test_outputs_that_no_message_can_hold_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frontend would cut the link, and with it all requests on it."""
    monkeypatch.setattr("pdserve.stream.framing.MAX_MESSAGE", LIMIT)
    async with WorkerGraph(engine=TensorEngine) as graph:
        frontend = await graph.frontend()
        others = [await frontend.submit(SHORT, 40) for _ in range(5)]
        large = await frontend.end_of(await frontend.submit(LARGE, 40))
        assert large.failed is not None
        assert (large.failed.invalid, large.failed.retry) == (True, False)
        assert "too large: Outputs has" in large.failed.message
        for other in others:
            assert (await frontend.end_of(other)).tokens == expected(SHORT, 40)
        await until(graph.decode_engine.all_blocks_free)


async def test_without_a_prefill_worker_everything_is_local() -> None:
    async with WorkerGraph() as graph:
        answered = await (await graph.frontend()).ask(LONG)
        assert answered.way[1] == "no-prefill-worker"
        assert answered.tokens == expected(LONG, 4)


async def test_without_nats_everything_is_local() -> None:
    async with WorkerGraph() as graph:
        await graph.prefill()
        await graph.broker.down()
        answered = await (await graph.frontend()).ask(LONG)
        assert answered.way[1] == "queue-down"
        assert answered.tokens == expected(LONG, 4)


async def test_prompt_logprobs_are_computed_here() -> None:
    async with WorkerGraph() as graph:
        await graph.prefill()
        answered = await (await graph.frontend()).ask(LONG, prompt_logprobs=0)
        assert answered.way[1] == "unsupported"


async def test_a_prompt_that_the_queue_lost_is_computed_here() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        frontend = await graph.frontend()
        lost = await frontend.submit(LONG)
        await until(lambda: graph.depth == 1)
        before = failures("queue-lost")
        await graph.broker.down()
        await graph.broker.up(lose_data=True)
        answered = await frontend.end_of(lost)
        assert failures("queue-lost") == before + 1
        assert answered.tokens == expected(LONG, 4)
        assert answered.way[1] == "fallback"


async def act_prefill(graph: WorkerGraph, name: str = "prefill-x", model: str = "demo") -> MemoryRegistry:
    """Make the decode worker believe in a prefill worker that a test acts by hand."""
    registry, queue = await graph.registry_of_another(), await graph.queue()
    await queue.expect_warm_ups(name)
    instance = Instance(name, Role.PREFILL, model, fingerprint=LOADED)
    await registry.put(f"instances/prefill/{name}", encode_record(instance))
    await until(lambda: name in {worker.id for worker in graph.decode.view.instances(role=Role.PREFILL)})
    return registry


@asynccontextmanager
async def pulled() -> AsyncIterator[tuple[WorkerGraph, MemoryQueue, FrontendStream, str]]:
    """A request, by its id, that prefill worker `prefill-x`, which the test acts, has pulled."""
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        queue, frontend = await graph.queue(), await graph.frontend()
        request_id = await frontend.submit(LONG)
        await queue.pull(1, 5.0)
        yield graph, queue, frontend, request_id


def handle(prompt: list[int], **changes: object) -> KvHandle:
    values: dict[str, object] = {
        "engine_id": "prefill-x",
        "request_id": "p",
        "host": "127.0.0.1",
        "port": 1,
        "block_ids": [list(range(-(-len(prompt) // 16)))],
        "num_tokens": len(prompt),
        "block_size": 16,
        "fingerprint": LOADED,
        "computed_at": time.monotonic(),
    }
    return KvHandle(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 32}, "invalid"),
        ({"block_ids": [[1]]}, "invalid"),
        ({"block_ids": [[1] * 32, [1] * 32, [1]]}, "invalid"),
        ({"num_tokens": 499}, "invalid"),
        ({"host": ""}, "invalid"),
        ({"fingerprint": "of other weights"}, "invalid"),
        ({"engine_id": "prefill-of-an-earlier-boot"}, "unknown-engine"),
    ],
)
async def test_an_answer_that_cannot_be_right_is_computed_here(
    changes: dict[str, object], reason: str
) -> None:
    async with pulled() as (_, queue, frontend, request_id):
        before = failures(reason)
        await queue.answer("decode-0", PrefillDone(request_id, handle(LONG, **changes)))
        answered = await frontend.end_of(request_id)
        assert answered.way == ("local", "fallback")
        assert answered.tokens == expected(LONG, 4)
        assert failures(reason) == before + 1


async def test_a_refusal_is_computed_here() -> None:
    async with pulled() as (_, queue, frontend, request_id):
        before = failures("too-long")
        await queue.answer("decode-0", PrefillFailed(request_id, "too-long"))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert failures("too-long") == before + 1


async def test_no_answer_within_the_bound_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.05)
    monkeypatch.setattr("pdserve.decode.policy.SLACK", 0.0)
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        queue = await graph.queue()
        await queue.pull(1, 0.0)  # listens for cancellations from here on
        before = failures("timeout")
        assert (await (await graph.frontend()).ask(LONG)).tokens == expected(LONG, 4)
        assert failures("timeout") == before + 1
        assert await queue.pull(1, 0.1) == [], "the request was taken back from the queue"


async def test_prefill_workers_of_another_model_do_not_count() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph, "prefill-other", model="other")
        frontend = await graph.frontend()
        answered = await frontend.ask(LONG)
        assert answered.way[1] == "no-prefill-worker"
        registry = await act_prefill(graph)
        request_id = await frontend.submit(LONG[::-1])
        await until(lambda: graph.depth == 1)
        before = failures("no-prefill-worker")
        await registry.delete("instances/prefill/prefill-x")
        answered = await frontend.end_of(request_id)
        assert failures("no-prefill-worker") == before + 1
        assert answered.way[1] == "fallback", "the other model's worker is not waited for"


async def test_a_prefill_worker_that_drains_finishes_what_it_has_and_nothing_else_is_left_to_it() -> None:
    async with WorkerGraph() as graph:
        registry = await act_prefill(graph)
        queue, frontend = await graph.queue(), await graph.frontend()
        pulled = await frontend.submit(LONG)
        await queue.pull(1, 5.0)
        await queue.answer("decode-0", PrefillStarted(pulled, "prefill-x"))
        await until(lambda: bool(graph.decode.requests.get(pulled).prefiller))  # type: ignore[union-attr]
        queued = await frontend.submit(LONG[::-1])
        await until(lambda: graph.depth == 1)
        draining = Instance("prefill-x", Role.PREFILL, "demo", fingerprint=LOADED, draining=True)
        before = failures("no-prefill-worker")
        await registry.put("instances/prefill/prefill-x", encode_record(draining))
        answered = await frontend.end_of(queued)
        assert failures("no-prefill-worker") == before + 1
        assert answered.tokens == expected(LONG[::-1], 4)
        assert not frontend.answered[pulled].over
        await queue.answer("decode-0", PrefillFailed(pulled, "engine"))
        assert (await frontend.end_of(pulled)).tokens == expected(LONG, 4)


async def test_workers_that_loaded_other_weights_never_meet() -> None:
    async with WorkerGraph() as graph:
        other = await graph.prefill("prefill-new", hf_overrides={"rope_theta": 7})
        frontend = await graph.frontend()
        answered = await frontend.ask(LONG)
        assert answered.way[1] == "no-prefill-worker"
        await graph.prefill("prefill-old")
        answered = await frontend.ask(LONG[::-1])
        assert answered.way[0] == "remote"
        assert answered.tokens == expected(LONG[::-1], 4)
        assert other.engine.usage.running == 0
        assert await other.engine.all_blocks_free()


async def test_kv_of_other_weights_would_give_other_tokens() -> None:
    """What the fingerprint guards against, on engines that are made to believe in each other."""
    async with (
        sim(Role.PREFILL, "prefill-0", hf_overrides={"rope_theta": 7}) as prefill,
        sim(Role.DECODE, "decode-0") as decode,
    ):
        await prefill.prefill("r", LONG, body())
        kv = (await collect(prefill, "r"))[-1].handle
        assert kv is not None
        with pytest.raises(ProtocolError, match="other weights"):
            await decode.generate("r", LONG, body(), kv)
        await decode.generate("r", LONG, body(), msgspec.structs.replace(kv, fingerprint=LOADED))
        outputs = await collect(decode, "r")
        assert [token for output in outputs for token in output.tokens] != expected(LONG, 4)


async def test_a_prompt_that_no_message_can_hold_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryQueue, "max_payload", 3000)
    async with WorkerGraph() as graph:
        await graph.prefill()
        frontend = await graph.frontend()
        large, small = await frontend.ask(LONG), await frontend.ask(LONG[100:200])
        assert large.way == ("local", "too-large")
        assert large.tokens == expected(LONG, 4)
        assert small.way == ("remote", "long")


async def test_the_last_prefill_worker_gone_ends_the_wait() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.going.clear()
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await until(lambda: prefill.engine.usage.running == 1)
        prefill.engine.die()
        with pytest.raises(EngineDead):
            await prefill.life
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)


async def test_a_late_answer_is_rejected_so_that_its_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.05)
    monkeypatch.setattr("pdserve.decode.policy.SLACK", 0.0)
    async with pulled() as (_, queue, frontend, request_id), sim(Role.PREFILL, "prefill-x") as prefill:
        await prefill.prefill(request_id, LONG, body())
        late = (await collect(prefill, request_id))[-1].handle
        assert late is not None
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert not await prefill.all_blocks_free()
        await queue.answer("decode-0", PrefillDone(request_id, late))
        await until(prefill.all_blocks_free)


@pytest.mark.usefixtures("brief_transfers")
async def test_a_killed_prefill_engine_after_its_answer_is_recomputed() -> None:
    async with pulled() as (_, queue, frontend, request_id):
        await queue.answer("decode-0", PrefillDone(request_id, handle(LONG)))
        answered = await frontend.end_of(request_id)
        assert answered.way[0] == "local"
        assert answered.tokens == expected(LONG, 4)


async def first_of(messages: list[ToFrontend]) -> list[str]:
    """What came until the first token, and how often anything came after it."""
    await until(lambda: any(isinstance(message, Outputs) for message in messages))
    return [type(message).__name__ for message in messages if not isinstance(message, WorkerLoad)]


@pytest.mark.usefixtures("brief_transfers")
async def test_the_first_token_does_not_wait_for_the_kv() -> None:
    """Which never comes: the request goes on after that token."""
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.drop_transfers = True
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        assert await first_of(frontend.messages) == ["Placed", "Outputs"]
        assert graph.decode.requests.tokens == len(LONG) + 1, "which counts as load, and in its trace"
        answered = frontend.answered[request_id]
        assert answered.way == ("remote", "long")
        assert answered.tokens == expected(LONG, 1)
        await frontend.end_of(request_id)
        assert answered.tokens == expected(LONG, 4)
        assert answered.way == ("local", "transfer")
        prefill.engine.faults.drop_transfers = False
        await until(graph.decode_engine.all_blocks_free)


async def test_a_request_of_one_token_never_enters_the_decode_engine() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        labels = {"model": "demo", "mode": "remote", "reason": "long"}
        counted = REGISTRY.get_sample_value("pdserve_prefill_total", labels) or 0
        answered = await (await graph.frontend()).ask(LONG, 1)
        assert answered.tokens == expected(LONG, 1)
        assert answered.way[0] == "remote"
        await until(prefill.engine.all_blocks_free)
        assert graph.decode_engine.prefix_hit(LONG, body()) == 0
        assert not len(graph.decode.requests)
        assert REGISTRY.get_sample_value("pdserve_prefill_total", labels) == counted + 1


async def test_cancel_after_the_first_token_frees_everything() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.drop_transfers = True
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await first_of(frontend.messages)
        await frontend.cancel(request_id)
        await until(lambda: not len(graph.decode.requests))
        prefill.engine.faults.drop_transfers = False
        await until(graph.decode_engine.all_blocks_free)
        assert frontend.answered[request_id].tokens == expected(LONG, 1)


@pytest.mark.parametrize("first", [[], [b"\xff"]])
async def test_an_answer_without_a_token_that_can_be_read_is_as_good(first: list[bytes]) -> None:
    """Of a worker of an earlier version, or for a request whose tokens no other engine may sample."""
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.pack = lambda outputs: first  # type: ignore[method-assign]
        answered = await (await graph.frontend()).ask(LONG)
        assert answered.tokens == expected(LONG, 4)
        assert answered.way[0] == "remote"


async def test_prompts_of_a_prefill_worker_that_died_are_computed_here_at_once() -> None:
    async with WorkerGraph() as graph:
        registry = await act_prefill(graph)
        await act_prefill(graph, "prefill-y")
        queue, frontend = await graph.queue(), await graph.frontend()
        before = failures("prefill-worker-gone")
        ids = [await frontend.submit(LONG), await frontend.submit(LONG[1:])]
        await queue.pull(2, 5.0)
        for request_id, worker in zip(ids, ["prefill-x", "prefill-y"], strict=True):
            await queue.answer("decode-0", PrefillStarted(request_id, worker))
        await until(lambda: all(graph.decode.requests.get(name).prefiller for name in ids))  # type: ignore[union-attr]
        await registry.delete("instances/prefill/prefill-x")
        assert (await frontend.end_of(ids[0])).tokens == expected(LONG, 4)
        assert failures("prefill-worker-gone") == before + 1
        assert graph.decode.requests.waiting == 1, "the other worker lives"
        again = await queue.pull(2, 5.0)
        assert [delivery.request.request_id for delivery in again] == ids[1:], "the other one was taken back"


@pytest.mark.parametrize("last", [True, False], ids=["the last worker", "one of two"])
async def test_the_last_words_of_a_prefill_worker_are_waited_for(last: bool) -> None:
    """They come by another connection than the word that it is gone: an engine that died of a request must count."""
    async with WorkerGraph() as graph:
        registry = await act_prefill(graph)
        if not last:
            await act_prefill(graph, "prefill-y")
        queue, frontend = await graph.queue(), await graph.frontend()
        before = failures("engine-died")
        request_id = await frontend.submit(LONG)
        await queue.pull(1, 5.0)
        await queue.answer("decode-0", PrefillStarted(request_id, "prefill-x"))
        await until(lambda: bool(graph.decode.requests.get(request_id).prefiller))  # type: ignore[union-attr]
        await registry.delete("instances/prefill/prefill-x")
        await until(lambda: len(graph.decode.view.instances(Role.PREFILL)) == (0 if last else 1))
        await asyncio.sleep(0)
        await queue.answer("decode-0", PrefillFailed(request_id, "engine-died", engine_died=True))
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert failures("engine-died") == before + 1


@pytest.mark.parametrize("message", ["started", "done"])
async def test_a_worker_that_is_not_registered_is_not_waited_for(message: str) -> None:
    async with pulled() as (_, queue, frontend, request_id):
        before = failures("unknown-engine")
        unknown = handle(LONG, engine_id="prefill-y")
        answers: dict[str, PrefillAnswer] = {
            "started": PrefillStarted(request_id, "prefill-y"),
            "done": PrefillDone(request_id, unknown),
        }
        await queue.answer("decode-0", answers[message])
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert failures("unknown-engine") == before + 1


async def test_kv_of_an_unknown_worker_is_rejected_when_it_is_known() -> None:
    """A prefill worker that lost its lease in etcd, and is back."""
    async with WorkerGraph() as graph, sim(Role.PREFILL, "prefill-x") as prefill:
        await act_prefill(graph, "prefill-y")
        queue = await graph.queue()
        await prefill.prefill("p", LONG, body())
        kept = (await collect(prefill, "p"))[-1].handle
        assert kept is not None
        lost = PrefillDone("a request of long ago", kept)
        await queue.answer("decode-0", lost)
        await act_prefill(graph)
        assert not await prefill.all_blocks_free()
        await queue.answer("decode-0", lost)
        await until(prefill.all_blocks_free)


async def test_kv_that_is_being_read_is_not_rejected_when_it_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAST, "bandwidth", 4e6)
    async with (
        pulled() as (graph, queue, frontend, request_id),
        sim(Role.PREFILL, "prefill-x") as prefill,
    ):
        await prefill.prefill("p", LONG, body())
        kept = (await collect(prefill, "p"))[-1].handle
        assert kept is not None
        for _ in range(3):
            await queue.answer("decode-0", PrefillDone(request_id, kept))
        await until(lambda: graph.decode_engine.usage.waiting == 1)
        await holds(lambda: graph.decode_engine.usage.waiting == 1)  # it still reads
        assert not await prefill.all_blocks_free()
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        await until(prefill.all_blocks_free)


@pytest.mark.usefixtures("brief_transfers")
async def test_kv_that_could_not_be_read_is_rejected_when_its_request_is_over(impatient: None) -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.drop_transfers = True
        before, frontend = failures("transfer"), await graph.frontend()
        graph.decode_engine.faults.going.clear()
        request_id = await frontend.submit(LONG)
        await until(lambda: [each.computes for each in graph.decode.requests.clients()] == [len(LONG)])
        graph.decode_engine.faults.going.set()
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert failures("transfer") == before + 1
        assert not await prefill.engine.all_blocks_free()
        prefill.engine.faults.drop_transfers = False
        await until(prefill.engine.all_blocks_free)


async def test_kv_of_an_answer_lost_with_nats_is_free_soon(
    monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr("pdserve.decode.policy.FLOOR", 0.05)
    monkeypatch.setattr("pdserve.decode.policy.SLACK", 0.0)
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.going.clear()
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await until(lambda: prefill.engine.usage.running == 1)
        await graph.broker.down()
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        prefill.engine.faults.going.set()
        await until(lambda: not prefill.engine.usage.running)
        assert not await prefill.engine.all_blocks_free()
        await graph.broker.up()
        await until(prefill.engine.all_blocks_free)


async def test_a_request_that_was_stored_though_it_seemed_not_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish = MemoryQueue.publish

    async def unsure(queue: MemoryQueue, request: PrefillRequest) -> None:
        await publish(queue, request)
        raise QueueUnavailable("not confirmed in time")

    monkeypatch.setattr(MemoryQueue, "publish", unsure)
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        before = failures("queue-down")
        assert (await (await graph.frontend()).ask(LONG)).tokens == expected(LONG, 4)
        assert failures("queue-down") == before + 1
        await until(lambda: not graph.broker.queue("pdserve", "model").entries)
        await until(prefill.engine.all_blocks_free)


async def test_a_full_queue_means_computing_here_at_once() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        graph.broker.bound = 0
        frontend = await graph.frontend()
        before = failures("queue-full")
        request_id = await frontend.submit(LONG)
        assert (await frontend.end_of(request_id)).tokens == expected(LONG, 4)
        assert failures("queue-full") == before + 1


async def test_cancel_while_the_request_is_queued() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        queue = await graph.queue()
        await queue.pull(1, 0.0)
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await until(lambda: graph.depth == 1)
        await frontend.cancel(request_id)
        await until(lambda: not len(graph.decode.requests))
        assert await queue.pull(1, 0.05) == []
        assert frontend.answered[request_id].placed is None


async def test_cancel_in_the_same_breath_sends_nothing_out() -> None:
    """Both lie there when the worker reads: the cancellation is handled before the request has had its first turn."""
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await frontend.cancel(request_id)
        await until(lambda: graph.decode.requests.get(request_id) is None)
        with pytest.raises(TimeoutError):
            await until(lambda: graph.depth > 0 or len(graph.decode.requests) > 0, within=0.1)
        again = await frontend.submit(LONG)
        await until(lambda: graph.depth == 1)
        await frontend.cancel(again)


async def test_kv_whose_lease_runs_out_at_the_last_moment_is_computed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the frontend is told how its prompt gets its KV, which may take a second. When it is the prompt's turn."""
    tell = TcpStreamServer.send

    async def slowly(server: TcpStreamServer, frontend: str, message: ToFrontend) -> None:
        if isinstance(message, Placed) and message.prefill == "remote":
            await asyncio.sleep(0.6)
        await tell(server, frontend, message)

    async with WorkerGraph(engine_args={"long-prefill-token-threshold": 16}) as graph:
        prefill = await graph.prefill(lease=LEASE_MARGIN + 0.4)
        monkeypatch.setattr(TcpStreamServer, "send", slowly)
        frontend = await graph.frontend()
        async with graph.decode._runner.turns.turn(16):
            request_id = await frontend.submit(LONG)
            await until(lambda: [each.computes for each in graph.decode.requests.clients()] == [len(LONG)])
            assert graph.decode.requests.waiting == 1
        answered = await frontend.end_of(request_id)
        assert answered.failed is None
        assert answered.tokens == expected(LONG, 4)
        assert answered.way == ("local", "fallback")
        assert answered.placed is not None
        hops = answered.placed.hops
        assert [hop.name for hop in hops] == ["queue", "prefill", "fallback", "turn", "prefill"]
        assert hops[2].why.startswith("expired: ")
        assert hops[4].start >= hops[3].start >= hops[2].start
        await until(prefill.engine.all_blocks_free)
        await until(graph.decode_engine.all_blocks_free)


async def test_cancel_while_it_is_prefilled_elsewhere_frees_everything() -> None:
    async with WorkerGraph() as graph:
        prefill = await graph.prefill()
        prefill.engine.faults.slow = 100.0
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG)
        await until(lambda: prefill.engine.usage.running == 1)
        await frontend.cancel(request_id)
        await until(prefill.engine.all_blocks_free)
        await until(lambda: not len(graph.decode.requests))
        assert await graph.decode_engine.all_blocks_free()


async def test_cancel_while_it_generates_frees_everything() -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        request_id = await frontend.submit(LONG, 1000)
        await until(lambda: len(frontend.answered[request_id].tokens) > 3)
        await frontend.cancel(request_id)
        await until(graph.decode_engine.all_blocks_free)
        assert not len(graph.decode.requests)


async def test_a_frontend_that_is_gone_takes_its_requests_along() -> None:
    async with WorkerGraph() as graph:
        await act_prefill(graph)
        other = await graph.frontend("b")
        async with FrontendStream(graph.stream.address, "a") as frontend:
            await frontend.submit(SHORT, 1000)
            await frontend.submit(LONG, 1000)
            kept = await other.submit(SHORT, 50)
            await until(lambda: graph.decode_engine.usage.running == 2)
        assert len((await other.end_of(kept)).tokens) == 50
        await until(graph.decode_engine.all_blocks_free)
        assert not len(graph.decode.requests)


async def test_one_frontend_cannot_cancel_anothers_request() -> None:
    async with WorkerGraph() as graph:
        frontend, other = await graph.frontend("a"), await graph.frontend("b")
        request_id = await frontend.submit(SHORT, 50)
        await other.cancel(request_id)
        assert len((await frontend.end_of(request_id)).tokens) == 50


async def test_outputs_of_a_step_come_in_one_message() -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        graph.decode_engine.faults.going.clear()
        ids = [await frontend.submit(SHORT, 5) for _ in range(8)]
        await until(lambda: graph.decode.requests.waiting == 0 and len(graph.decode.requests) == 8)
        graph.decode_engine.faults.going.set()
        for request_id in ids:
            await frontend.end_of(request_id)
        assert len([sent for sent in frontend.messages if type(sent).__name__ == "Outputs"]) <= 8


async def test_an_id_is_refused_the_second_time() -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        request_id = await frontend.submit(SHORT)
        await frontend.end_of(request_id)
        frontend.answered[request_id].finished = False
        await frontend.submit(SHORT, request_id=request_id)
        failed = (await frontend.end_of(request_id)).failed
        assert failed is not None
        assert not failed.retry


@pytest.mark.parametrize("prompt", [[], list(range(9000))])
async def test_a_request_that_the_engine_refuses_fails_alone(prompt: list[int]) -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        failed = (await frontend.ask(prompt)).failed
        assert failed is not None
        assert not failed.retry
        assert (await frontend.ask(SHORT)).tokens == expected(SHORT, 4)


async def test_a_passed_deadline_fails_at_once_and_while_running() -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        late = await frontend.end_of(await frontend.submit(SHORT, seconds=-1))
        assert late.failed is not None
        running = await frontend.end_of(await frontend.submit(SHORT, 5000, seconds=0.2))
        assert running.failed is not None
        assert running.tokens
        await until(graph.decode_engine.all_blocks_free)


async def test_a_request_that_waits_for_its_turn_is_failed_once() -> None:
    async with WorkerGraph(engine_args={"long-prefill-token-threshold": 16}) as graph:
        graph.decode_engine.faults.going.clear()
        frontend = await graph.frontend()
        first, second = [await frontend.submit(SHORT) for _ in range(2)]
        await until(lambda: graph.decode.requests.waiting == 1)
        waits = graph.decode.requests.get(second)
        assert waits is not None
        for _ in range(2):
            await graph.decode._frontends.end(waits, "its deadline passed", retry=False)
        graph.decode_engine.faults.going.set()
        assert (await frontend.end_of(first)).tokens == expected(SHORT, 4)
        assert [message.request_id for message in frontend.messages if isinstance(message, Failed)] == [
            second
        ]
        await until(lambda: not graph.decode.requests)


async def test_another_vllm_version_is_refused() -> None:
    async with WorkerGraph() as graph:
        frontend = await graph.frontend()
        await frontend.client.send(Hello(graph.decode_engine.facts.vllm_version))
        await frontend.ask(SHORT)
        assert not frontend.refused
        await frontend.client.send(Hello("0.1"))
        await until(lambda: bool(frontend.refused))
        assert "0.1" in frontend.refused[0].message


async def test_a_decode_worker_registers_its_instance_and_its_card() -> None:
    async with WorkerGraph() as graph:
        other = await graph.registry_of_another()
        instance = decode_instance((await other.read("instances/decode/"))["instances/decode/decode-0"])
        assert (instance.address, instance.model, instance.block_size) == (graph.stream.address, "demo", 16)
        card = decode_card((await other.read("models/"))["models/demo/decode-0"])
        assert (card.name, card.model, card.engine_args["max-model-len"]) == ("demo", "demo", 8192)
        frontend = await graph.frontend()
        await frontend.submit(SHORT, 5000)
        graph.decode.stop()
        await frontend.client.__aexit__(None, None, None)
        await graph.life
        assert await other.read("") == {}


async def test_frontends_get_the_archive_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with (
        WorkerGraph(model=str(tmp_path)) as graph,
        TcpStreamClient(graph.stream.address, "new") as client,
    ):
        archive = await fetch(client)
        async with RegistryView(await graph.registry_of_another()) as view:
            ((_, card),) = view.cards()["demo"]
    assert archive_name(archive) == card.blob
    assert archive == pack_model(tmp_path)


async def test_frontends_are_told_its_load() -> None:
    """At once when they come, and when it changes: without the registry, which is away."""
    async with WorkerGraph() as graph:
        await graph.registry.down()
        older = Hello(graph.decode_engine.facts.vllm_version)
        hello = msgspec.structs.replace(older, follow_load=True)
        frontend, untold = await graph.frontend(), [await graph.frontend(f"frontend-{n}") for n in (3, 4)]
        await frontend.client.send(hello)
        await untold[0].client.send(msgspec.structs.replace(hello, vllm_version="0.1"))
        await untold[1].client.send(older)
        await until(lambda: frontend.loads == [Load(queue_limit=4)])
        request = await frontend.submit(SHORT, 5000)
        await until(lambda: frontend.loads[-1].running == 1)
        tokens = frontend.loads[-1].tokens
        assert tokens >= len(SHORT)
        await until(lambda: frontend.loads[-1].tokens > tokens)
        other = await graph.frontend("frontend-2")
        await other.client.send(hello)
        await until(lambda: bool(other.loads))
        assert other.loads[0].running == 1
        await frontend.cancel(request)
        await until(lambda: frontend.loads[-1] == Load(queue_limit=4) == other.loads[-1])
        assert [each.loads for each in untold] == [[], []]


async def test_thresholds_change_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerGraph() as graph:
        await graph.prefill()
        frontend, registry = await graph.frontend(), await graph.registry_of_another()
        await registry.put("settings/max-local-prefill-length", b"10", leased=False)
        await registry.put("settings/max-prefill-queue-size", b"many", leased=False)
        await until(lambda: graph.decode.settings.current.max_local_prefill_length == 10)
        assert graph.decode.settings.current.max_prefill_queue_size == 4
        assert "max-prefill-queue-size='many' ignored" in caplog.text
        answered = await frontend.ask(SHORT)
        assert answered.way[0] == "remote"
        await registry.delete("settings/max-local-prefill-length")
        await until(lambda: graph.decode.settings.current.max_local_prefill_length == 32)


async def test_prompts_go_the_cheaper_way() -> None:
    """An idle worker computes by itself; beside running streams and prompts a prefill worker does, until it has
    more to do than this."""
    async with WorkerGraph(policy="adaptive") as graph:
        await graph.prefill()
        frontend = await graph.frontend()
        idle = await frontend.ask(LONG)
        assert idle.way == ("local", "idle")
        graph.decode_engine.faults.slow = 20.0
        prompts = [list(range(number, number + 500)) for number in range(1000, 9000, 500)]
        names = [await frontend.submit(prompt, 20) for prompt in prompts]
        ends = [await frontend.end_of(name) for name in names]
        reasons = [end.placed.reason for end in ends if end.placed is not None]
        assert reasons[0] == "idle"
        assert set(reasons[1:]) == {"local-cheaper", "remote-cheaper"}
        assert [end.tokens for end in ends] == [expected(prompt, 20) for prompt in prompts]


async def test_a_policy_is_set_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerGraph(policy="adaptive") as graph:
        settings, registry = graph.decode.settings, await graph.registry_of_another()
        await registry.put("settings/max-local-prefill-length", b"7", leased=False)
        await until(lambda: settings.current.policy == "threshold")
        await registry.put("settings/policy", b"adaptive", leased=False)
        await until(lambda: settings.current.policy == "adaptive")
        assert settings.current.max_local_prefill_length == 7
        await registry.put("settings/policy", b"best", leased=False)
        await until(lambda: settings.current.policy == "threshold")
        assert "policy='best' ignored: it takes one of threshold, adaptive" in caplog.text
        await registry.delete("settings/max-local-prefill-length")
        await until(lambda: settings.current.policy == "adaptive")


async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async with WorkerGraph() as graph:
        frontend, other = await graph.frontend(), await graph.registry_of_another()
        running = await frontend.submit(SHORT, 200)
        await until(lambda: bool(frontend.answered[running].tokens))
        graph.decode.stop()
        await until(lambda: not graph.decode.ready.is_set())
        record = (await other.read("instances/decode/"))["instances/decode/decode-0"]
        assert decode_instance(record).draining
        refused = await frontend.ask(SHORT)
        assert refused.failed is not None
        assert refused.failed.retry
        assert len((await frontend.end_of(running)).tokens) == 200
        await graph.life
        assert await other.read("") == {}


async def test_requests_that_outlast_the_drain_fail_with_retry() -> None:
    async with WorkerGraph(drain_timeout=0.05) as graph:
        frontend = await graph.frontend()
        running = await frontend.submit(SHORT, 5000)
        await until(lambda: bool(frontend.answered[running].tokens))
        graph.decode.stop()
        failed = (await frontend.end_of(running)).failed
        assert failed is not None
        assert failed.retry
        await graph.life


async def test_a_dead_engine_ends_the_worker() -> None:
    async with WorkerGraph() as graph:
        graph.decode_engine.die()
        with pytest.raises(EngineDead):
            await graph.life


async def test_many_at_once_come_out_right() -> None:
    async with WorkerGraph() as graph:
        for number in range(2):
            await graph.prefill(f"prefill-{number}")
        frontend = await graph.frontend()
        prompts = [[3 + number, *LONG[: 40 + 7 * number]] for number in range(40)]
        ids = [await frontend.submit(prompt, 6) for prompt in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert (await frontend.end_of(request_id)).tokens == expected(prompt, 6)
        modes = {answered.placed.prefill for answered in frontend.answered.values() if answered.placed}
        assert modes == {"local", "remote"}


async def test_a_prefill_worker_whose_side_channel_is_broken_is_avoided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_workers, "AVOID_FOR", 60.0)
    async with WorkerGraph() as graph:
        frontend, broken = await graph.frontend(), await graph.prefill()
        broken.engine.faults.deaf = True
        first = await frontend.ask(list(range(3, 203)))
        assert first.finished, "what could not be read was computed here"
        second = await frontend.ask(list(range(203, 403)))
        assert second.way == ("local", "no-prefill-worker")
        await graph.prefill("prefill-1")
        for number in range(4, 8):  # whichever of the two pulls it
            answered = await frontend.ask(list(range(number * 100, number * 100 + 100)))
            assert answered.finished
        broken.engine.faults.deaf = False
        graph.decode._workers._avoided["prefill-0"] -= 60.0
        assert len(graph.decode._workers.available()) == 2, "it is tried again"
