"""The decode worker on simulated engines: local and remote prefill, and their failures."""

import asyncio
from typing import Any

import msgspec
import pytest

from pdserve.contract.messages import (
    Failed,
    Hello,
    KvHandle,
    Load,
    Outputs,
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    PrefillStarted,
)
from pdserve.contract.records import MIN_KV_WIRE, Instance, Role, decode_instance, encode_record
from pdserve.decode.peers.prefill_workers import longest_prompt
from pdserve.decode.policy.decision import TIMEOUT_FACTOR
from pdserve.decode.scheduling.prefill_times import FIRST_TOKEN_SECONDS
from pdserve.engine.base import Output
from pdserve.engine.sim.engine import SimEngine
from pdserve.util.errors import QueueUnavailable
from tests.conditions import holds, until
from tests.decode.graph import (
    LONG,
    SHORT,
    ActedPrefill,
    Answered,
    FrontendStream,
    Prefill,
    WorkerGraph,
    counted,
    failing,
    handle,
)
from tests.engine.sims import FAST, LOADED, body, collect, sim
from tests.memory.queue import MemoryQueue

LARGE = list(range(3, 33))


async def prefilled(engine: SimEngine, request_id: str = "p") -> KvHandle:
    await engine.prefill(request_id, LONG, body())
    handle = (await collect(engine, request_id))[-1].handle
    assert handle is not None
    return handle


MAX_BYTES = 30_000
"""of a message"""


class TensorEngine(SimEngine):
    def pack(self, outputs: list[Output]) -> list[bytes]:
        """Add tensors, as of logprobs: `MAX_BYTES / 3` per output, or `2 * MAX_BYTES` if a prompt is `LARGE`."""
        prompts = [each.raw.prefill_stats.num_prompt_tokens for each in outputs if each.raw.prefill_stats]
        size = 2 * MAX_BYTES if len(LARGE) in prompts else len(outputs) * MAX_BYTES // 3
        return [*super().pack(outputs), bytes(size)]


async def test_outputs_that_no_message_can_hold_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An oversized message would make the frontend close the connection, with all its requests."""
    monkeypatch.setattr("pdserve.stream.framing.MAX_MESSAGE", MAX_BYTES)
    async with WorkerGraph(engine=TensorEngine) as graph:
        frontend = await graph.frontend()
        others = [await frontend.submit(SHORT, 40) for _ in range(5)]
        failed = await frontend.failure(await frontend.submit(LARGE, 40))
        assert (failed.invalid, failed.retry) == (True, False)
        assert "too large: Outputs has" in failed.message
        for other in others:
            assert not (await frontend.end_of(other)).failed
        await graph.frees_all()


async def test_a_prompt_that_the_queue_lost_is_prefilled_locally(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    lost = await frontend.submit(LONG)
    await until(lambda: graph.depth == 1)
    with failing("queue-lost"):
        await graph.broker.down()
        await graph.broker.up(lose_data=True)
        assert (await frontend.end_of(lost)).way[1] == "fallback"


ANSWERS: list[tuple[str, PrefillAnswer | dict[str, Any]]] = [
    ("invalid", {"num_tokens": 499}),
    ("invalid", {"fingerprint": "of other weights"}),
    ("unknown-engine", {"engine_id": "prefill-of-an-earlier-boot"}),
    ("unknown-engine", PrefillStarted("", "prefill-y")),
    ("too-long", PrefillFailed("", "too-long")),
]
"""The reason in the failure metric, and the answer or the wrong fields of its handle."""


@pytest.mark.parametrize(("reason", "answer"), ANSWERS)
async def test_a_prompt_whose_answer_has_no_readable_kv_is_prefilled_locally(
    acted: ActedPrefill, frontend: FrontendStream, pulled: str, reason: str, answer: Any
) -> None:
    done = PrefillDone("", handle(LONG, **answer)) if isinstance(answer, dict) else answer
    with failing(reason):
        await acted.answer(msgspec.structs.replace(done, request_id=pulled))
        assert (await frontend.end_of(pulled)).way == ("local", "fallback")


async def test_a_prompt_that_is_longer_than_prefill_workers_take_is_prefilled_locally(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    await acted.register(max_model_len=len(LONG))
    await until(lambda: longest_prompt(graph.decode._workers.available()) == len(LONG) - 1)
    assert (await frontend.ask(LONG)).way == ("local", "too-large")
    pulled = await frontend.submit([token + len(LONG) for token in LONG[:-1]])
    assert [delivery.request.request_id for delivery in await acted.pull()] == [pulled]


async def test_prefill_workers_of_another_model_or_with_other_weights_do_not_count(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    await graph.act_prefill("prefill-other", model="other")
    other = await graph.prefill("prefill-1", hf_overrides={"rope_theta": 7})
    assert (await frontend.ask(LONG)).way[1] == "no-prefill-worker"
    acted = await graph.act_prefill()
    request_id = await frontend.submit(LONG[::-1])
    await until(lambda: graph.depth == 1)
    with failing("no-prefill-worker"):
        await acted.leave()
        answered = await frontend.end_of(request_id)
    assert answered.way[1] == "fallback", "the request waits for no unsuitable worker"
    assert other.engine.usage.running == 0
    assert await other.engine.all_blocks_free()


async def test_a_draining_prefill_worker_finishes_its_prompts_and_gets_no_others(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, pulled: str
) -> None:
    await acted.start(pulled)
    queued = await frontend.submit(LONG[::-1])
    await until(lambda: graph.depth == 1)
    with failing("no-prefill-worker"):
        await acted.register(draining=True)
        await frontend.end_of(queued)
    assert not frontend.answered[pulled].over
    await acted.answer(PrefillFailed(pulled, "engine"))
    await frontend.end_of(pulled)


def _fallbacks(answered: Answered) -> list[str]:
    assert answered.placed
    return [hop.why for hop in answered.placed.hops if hop.name == "fallback"]


async def test_a_prompt_that_the_queue_cannot_take_is_prefilled_locally(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryQueue, "max_payload", 3000)
    assert (await frontend.ask(LONG)).way == ("local", "too-large")
    assert (await frontend.ask(LONG[100:200])).way == ("remote", "long")
    graph.broker.bound = 0
    with failing("queue-full"):
        answered = await frontend.ask(LONG[200:300])
    assert answered.way == ("local", "fallback")
    (fell,) = _fallbacks(answered)
    assert fell.startswith("queue-full: the queue had no room for the prompt (0.")


@pytest.mark.usefixtures("hasty")
async def test_a_late_answer_is_rejected_and_its_blocks_are_freed(
    acted: ActedPrefill, frontend: FrontendStream, pulled: str
) -> None:
    async with sim(Role.PREFILL, "prefill-x") as prefill:
        late = await prefilled(prefill)
        await frontend.end_of(pulled)
        assert not await prefill.all_blocks_free()
        await acted.answer(PrefillDone(pulled, late))
        await until(prefill.all_blocks_free)


async def test_prompts_of_a_prefill_worker_that_died_are_prefilled_locally_at_once(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    other = await graph.act_prefill("prefill-y")
    ids = [await frontend.submit(LONG), await frontend.submit(LONG[1:])]
    await acted.pull(2)
    await acted.start(ids[0])
    await other.start(ids[1])
    with failing("prefill-worker-gone"):
        await acted.leave()
        await frontend.end_of(ids[0])
    assert graph.decode.requests.waiting == 1, "the other worker lives"
    again = await acted.pull(2)
    assert [delivery.request.request_id for delivery in again] == ids[1:], (
        "the dead worker's prompt was taken back"
    )


@pytest.mark.parametrize("last", [True, False], ids=["the last worker", "one of two"])
async def test_requests_wait_for_the_last_messages_of_a_lost_prefill_worker(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, pulled: str, last: bool
) -> None:
    """Messages may come after the registry's change. A message that reports an engine's death must still count."""
    if not last:
        await graph.act_prefill("prefill-y")
    await acted.start(pulled)
    with failing("engine-died"):
        await acted.leave()
        await until(lambda: len(graph.decode.view.instances(Role.PREFILL)) == (0 if last else 1))
        await asyncio.sleep(0)
        await acted.answer(PrefillFailed(pulled, "engine-died", engine_died=True))
        await frontend.end_of(pulled)


async def test_kv_of_an_unknown_worker_is_rejected_once_the_worker_is_known(graph: WorkerGraph) -> None:
    """The prefill worker lost its lease in etcd and registers again."""
    async with sim(Role.PREFILL, "prefill-x") as prefill:
        other = await graph.act_prefill("prefill-y")
        lost = PrefillDone("a request of long ago", await prefilled(prefill))
        await other.answer(lost)
        await graph.act_prefill()
        assert not await prefill.all_blocks_free()
        await other.answer(lost)
        await until(prefill.all_blocks_free)


@pytest.fixture
def slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAST, "bandwidth", 4e6)


@pytest.mark.usefixtures("slow_line")
async def test_kv_that_is_being_read_is_not_rejected_when_it_is_offered_again(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream, pulled: str
) -> None:
    async with sim(Role.PREFILL, "prefill-x") as prefill:
        kept = await prefilled(prefill)
        await acted.answer(*[PrefillDone(pulled, kept)] * 3)
        await until(lambda: graph.decode_engine.usage.waiting == 1)
        await holds(lambda: graph.decode_engine.usage.waiting == 1)  # it still reads
        assert not await prefill.all_blocks_free()
        await frontend.end_of(pulled)
        await until(prefill.all_blocks_free)


@pytest.mark.usefixtures("brief_transfers", "impatient")
async def test_kv_that_could_not_be_read_is_rejected_when_its_request_is_over(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    prefill.engine.faults.drop_transfers = True
    graph.decode_engine.faults.going.clear()
    with failing("transfer"):
        request_id = await frontend.submit(LONG)
        await until(lambda: [each.local_tokens for each in graph.decode.requests.clients()] == [len(LONG)])
        graph.decode_engine.faults.going.set()
        await frontend.end_of(request_id)
    assert not await prefill.engine.all_blocks_free()
    prefill.engine.faults.drop_transfers = False
    await prefill.frees_all()


@pytest.mark.usefixtures("hasty", "impatient")
async def test_kv_of_an_answer_lost_with_nats_is_free_soon(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    prefill.engine.faults.going.clear()
    request_id = await frontend.submit(LONG)
    await until(lambda: prefill.engine.usage.running == 1)
    await graph.broker.down()
    await frontend.end_of(request_id)
    prefill.engine.faults.going.set()
    await until(lambda: not prefill.engine.usage.running)
    assert not await prefill.engine.all_blocks_free()
    await graph.broker.up()
    await prefill.frees_all()


async def test_a_prompt_that_was_stored_without_confirmation_leaves_nothing(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = MemoryQueue.publish

    async def unsure(queue: MemoryQueue, request: PrefillRequest) -> None:
        await publish(queue, request)
        raise QueueUnavailable("not confirmed in time")

    monkeypatch.setattr(MemoryQueue, "publish", unsure)
    with failing("queue-down"):
        (fell,) = _fallbacks(await frontend.ask(LONG))
    assert fell.startswith("queue-down: NATS did not take the prompt (")
    await until(lambda: not graph.broker.queue("pdserve", "model").entries)
    await prefill.frees_all()


async def test_cancel_at_once_and_while_the_request_is_queued(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    """The first request is cancelled before its task runs, because request and cancellation arrive together."""
    at_once = await frontend.submit(LONG)
    await frontend.cancel(at_once)
    queued = await frontend.submit(LONG[1:])
    await until(lambda: graph.depth == 1)
    assert graph.decode.load().backlog == pytest.approx(499 * FIRST_TOKEN_SECONDS, abs=0.0005)
    assert counted("pdserve_backlog_seconds", role="prefill") > 0
    await frontend.cancel(queued)
    await until(lambda: not len(graph.decode.requests))
    assert await acted.queue.pull(1, 0.05) == []
    assert acted.queue._requests.ids == {queued}
    assert [each.placed for each in frontend.answered.values()] == [None, None]
    assert graph.decode.load().backlog == counted("pdserve_backlog_seconds", role="prefill") == 0


async def test_a_prompt_whose_kv_lease_ends_before_the_read_is_prefilled_locally(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease ends after the decode worker's check of the handle, and another prompt gets the blocks."""
    async with WorkerGraph() as graph:
        prefill = await graph.prefill(lease=0.2, num_gpu_blocks_override=40)
        generate = graph.decode_engine.generate

        async def slowly(request_id: str, *rest: Any) -> None:
            await until(prefill.engine.all_blocks_free)
            await prefill.engine.prefill("other", LONG[::-1], body())
            await until(lambda: not prefill.engine.usage.running)
            await generate(request_id, *rest)

        monkeypatch.setattr(graph.decode_engine, "generate", slowly)
        frontend = await graph.frontend()
        with failing("transfer"):
            answered = await frontend.ask(LONG)
        assert answered.way == ("local", "transfer")
        await prefill.frees_all()
        await graph.frees_all()


async def test_a_prefill_worker_that_cannot_confirm_reads_is_not_asked(graph: WorkerGraph) -> None:
    acted = await graph.act_prefill()
    assert graph.decode._workers.available() != []
    old = Instance(acted.name, Role.PREFILL, acted.model, wire=MIN_KV_WIRE - 1, fingerprint=LOADED)
    await acted.registry.put(f"instances/prefill/{acted.name}", encode_record(old))
    await until(lambda: graph.decode._workers.available() == [])


@pytest.mark.parametrize("phase", ["remote prefill", "first token", "generates"])
async def test_cancel_frees_everything(graph: WorkerGraph, frontend: FrontendStream, phase: str) -> None:
    prefill = await graph.prefill() if phase != "generates" else None
    if prefill and phase == "first token":
        prefill.engine.faults.drop_transfers = True
    elif prefill:
        prefill.engine.faults.slow = 100.0
    request_id = await frontend.submit(LONG, 1000)
    answered = frontend.answered[request_id]
    if prefill and phase == "remote prefill":
        await until(lambda: prefill.engine.usage.running == 1)
    else:
        await until(lambda: len(answered.tokens) > (0 if prefill else 3))
    await frontend.cancel(request_id)
    await until(lambda: not len(graph.decode.requests))
    if prefill:
        assert len(answered.tokens) == (phase == "first token")
        prefill.engine.faults.drop_transfers = False
        await prefill.frees_all()
    await graph.frees_all()


async def test_requests_of_a_lost_frontend_are_cancelled(graph: WorkerGraph, acted: ActedPrefill) -> None:
    """A frontend cannot cancel another's requests."""
    other = await graph.frontend("b")
    async with FrontendStream(graph.stream.address, "a") as frontend:
        await frontend.submit(SHORT, 1000)
        await frontend.submit(LONG, 1000)
        kept = await other.submit(SHORT, 200)
        await until(lambda: graph.decode_engine.usage.running == 2)
        await frontend.cancel(kept)
    assert not (await other.end_of(kept)).failed
    await graph.frees_all()
    assert not len(graph.decode.requests)


async def test_outputs_of_a_step_come_in_one_message(graph: WorkerGraph, frontend: FrontendStream) -> None:
    graph.decode_engine.faults.going.clear()
    ids = [await frontend.submit(SHORT, 5) for _ in range(8)]
    await until(lambda: graph.decode.requests.waiting == 0 and len(graph.decode.requests) == 8)
    graph.decode_engine.faults.going.set()
    for request_id in ids:
        await frontend.end_of(request_id)
    assert sum(isinstance(message, Outputs) for message in frontend.messages) <= 8


async def test_an_impossible_request_fails_alone(graph: WorkerGraph, frontend: FrontendStream) -> None:
    """The requests have a used id, an empty prompt, a too long prompt, a past deadline, or one that passes soon."""
    used = await frontend.submit(SHORT)
    (await frontend.end_of(used)).finished = False
    await frontend.submit(SHORT, request_id=used)
    assert not (await frontend.failure(used)).retry
    for prompt in ([], list(range(9000))):
        assert not (await frontend.failure(await frontend.submit(prompt))).retry
    assert await frontend.failure(await frontend.submit(SHORT, seconds=-1))
    running = await frontend.submit(SHORT, 5000, seconds=0.2)
    assert await frontend.failure(running)
    assert frontend.answered[running].tokens
    assert not (await frontend.ask(SHORT)).failed
    await graph.frees_all()


async def test_a_request_that_waits_for_its_turn_is_failed_once() -> None:
    async with WorkerGraph(engine_args={"long-prefill-token-threshold": 16}) as graph:
        graph.decode_engine.faults.going.clear()
        frontend = await graph.frontend()
        first, second = [await frontend.submit(SHORT) for _ in range(2)]
        await until(lambda: graph.decode.requests.waiting == 1)
        waits = graph.request(second)
        for _ in range(2):
            await graph.decode._frontends.end(waits, "its deadline passed", retry=False)
        graph.decode_engine.faults.going.set()
        assert not (await frontend.end_of(first)).failed
        failed = [message for message in frontend.messages if isinstance(message, Failed)]
        assert [message.request_id for message in failed] == [second]
        await until(lambda: not graph.decode.requests)


async def test_the_load_is_sent_to_frontends_that_follow_it(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    """The load is sent at once and at each change, although the registry is down."""
    await graph.registry.down()
    older = Hello(graph.decode_engine.facts.vllm_version)
    hello = msgspec.structs.replace(older, follow_load=True)
    others = [await graph.frontend(f"frontend-{n}") for n in (3, 4)]
    await frontend.client.send(hello)
    await others[0].client.send(msgspec.structs.replace(hello, vllm_version="0.1"))
    await others[1].client.send(older)
    await until(lambda: frontend.loads == [Load(queue_limit=4, token_seconds=FIRST_TOKEN_SECONDS)])
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
    await until(lambda: not (frontend.loads[-1].tokens or other.loads[-1].tokens))
    assert frontend.loads[-1].running == other.loads[-1].running == 0
    assert [each.loads for each in others] == [[], []]
    assert ["0.1" in each.message for each in others[0].refused] == [True], "another version of vLLM"
    assert not others[1].refused


async def test_settings_change_at_run_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Setting a threshold selects the policy `threshold`, unless a policy is set, too."""
    async with WorkerGraph(policy="adaptive") as graph:
        await graph.prefill()
        frontend, registry = await graph.frontend(), await graph.registry_of_another()
        settings = graph.decode.settings
        assert (await frontend.ask(LONG)).way == ("local", "idle")
        await frontend.stream(LONG[7:40])
        assert (await frontend.ask(LONG[::-1])).way[1] in ("local-cheaper", "remote-cheaper")
        await registry.put("settings/max-prefill-queue-size", b"many", leased=False)
        await registry.put("settings/max-local-prefill-length", b"10", leased=False)
        await until(lambda: settings.current.policy == "threshold")
        assert settings.current.max_prefill_queue_size == 4
        assert "max-prefill-queue-size='many' ignored" in caplog.text
        assert (await frontend.ask(SHORT)).way == ("remote", "long")
        await registry.put("settings/policy", b"adaptive", leased=False)
        await until(lambda: settings.current.policy == "adaptive")
        assert settings.current.max_local_prefill_length == 10
        await registry.put("settings/policy", b"best", leased=False)
        await until(lambda: settings.current.policy == "threshold")
        assert "policy='best' ignored: it takes one of threshold, adaptive" in caplog.text
        await registry.delete("settings/max-local-prefill-length")
        await until(lambda: settings.current.policy == "adaptive")
        assert settings.current.max_local_prefill_length == 32


async def test_drain_finishes_running_requests_and_takes_no_new_ones(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    other, running = await graph.registry_of_another(), await frontend.stream(max_tokens=200)
    graph.decode.stop()
    await until(lambda: not graph.decode.ready.is_set())
    record = (await other.read("instances/decode/"))["instances/decode/decode-0"]
    assert decode_instance(record).draining
    assert (await frontend.failure(await frontend.submit(SHORT))).retry
    assert not (await frontend.end_of(running)).failed
    await graph.life
    assert await other.read("") == {}


async def test_requests_that_outlast_the_drain_fail_with_retry() -> None:
    async with WorkerGraph(drain_timeout=0.05) as graph:
        frontend = await graph.frontend()
        running = await frontend.stream()
        graph.decode.stop()
        assert (await frontend.failure(running)).retry
        await graph.life


async def test_the_timeout_of_a_remote_prefill_counts_only_computed_tokens() -> None:
    """Otherwise, a new prompt would time out too early after many prompts with one cached prefix."""
    async with WorkerGraph() as graph:
        await graph.prefill(**{"prefill-rate": 10_000.0})  # type: ignore[arg-type]
        frontend = await graph.frontend()
        for n in range(4):
            await frontend.ask([*range(1000, 2600), *range(20 + 160 * n, 180 + 160 * n)])
        assert graph.decode._remote.timeout.seconds(1_000_000, 0, 1) > TIMEOUT_FACTOR * 1_000_000 / 30_000


async def test_a_local_prompt_counts_without_a_prefix_computed_while_it_waited() -> None:
    """Else the worker would measure a speed that it does not have."""
    async with WorkerGraph(engine_args={"long-prefill-token-threshold": 64}) as graph:
        frontend, learned = await graph.frontend(), list[int]()
        graph.decode._runner.estimator.first_token = (  # type: ignore[method-assign]
            lambda request, now: learned.append(request.local_tokens)
        )
        asked = [await frontend.submit([*LONG, *range(1000, 1000 + by)]) for by in (0, 40)]
        for each in asked:
            await frontend.end_of(each)
    assert learned == [len(LONG), len(LONG) + 40 - len(LONG) // 16 * 16]


async def test_a_prompt_is_local_if_this_engine_computes_its_prefix_already() -> None:
    async with WorkerGraph(max_local_prefill_length=len(LONG)) as graph:
        await graph.prefill()
        frontend = await graph.frontend()
        graph.decode_engine.faults.going.clear()
        asked = [await frontend.submit(each) for each in (LONG, [*LONG, *SHORT], [*SHORT, *LONG])]
        await until(lambda: [each.local_tokens for each in graph.decode.requests.clients()] == [500, 24, 0])
        graph.decode_engine.faults.going.set()
        ways = [(await frontend.end_of(each)).way for each in asked]
    assert ways == [("local", "short"), ("local", "short"), ("remote", "long")]


async def test_a_prefix_of_a_flex_prompt_that_waits_is_not_under_way_for_others() -> None:
    """The prompts of other clients come before the flex prompt."""
    arguments = {"long-prefill-token-threshold": 64}
    async with WorkerGraph(max_local_prefill_length=len(LONG), engine_args=arguments) as graph:
        await graph.prefill()
        frontend = await graph.frontend()
        graph.decode_engine.faults.going.clear()
        first = await frontend.submit(list(range(1000, 1400)))
        flex = await frontend.submit(LONG, client="~batch")
        asked = await frontend.submit([*LONG, *SHORT])
        await until(
            lambda: len(graph.decode.requests.clients()) == 3 and graph.request(asked).answer is not None
        )
        graph.decode_engine.faults.going.set()
        ways = [(await frontend.end_of(each)).way for each in (first, flex, asked)]
    assert ways == [("local", "short"), ("local", "short"), ("remote", "long")]
