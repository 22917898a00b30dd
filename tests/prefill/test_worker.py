"""The prefill worker on a simulated engine; the tests act as decode workers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest

from pdserve.contract.messages import (
    KvHandle,
    PrefillAnswer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    PrefillStarted,
)
from pdserve.contract.records import Role, decode_instance
from pdserve.engine.sim.engine import SimEngine
from pdserve.kv.handles import check_handle
from pdserve.prefill.answer_sender import AnswerSender
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.presence import Presence
from pdserve.runtime.tasks import TaskOwner
from pdserve.util.errors import EngineDead
from tests.conditions import holds, until
from tests.decode.graph import Prefill, Seams, config
from tests.engine.sims import LOADED, body, sim, spec

PROMPT = list(range(3, 203))


class Scene(Seams):
    """`async with Scene() as scene`: one prefill worker, and another process's queue and registry."""

    def __init__(self, drain_timeout: float = 5.0, **arguments: object) -> None:
        super().__init__(config(drain_timeout=drain_timeout))
        self.broker.ack_wait = 0.3
        self.arguments = arguments
        self.started: dict[str, str] = {}
        self.answers: dict[str, list[PrefillAnswer]] = {}

    async def __aenter__(self) -> Self:
        self.decode, self.other = await self.queue(), await self.registry_of_another()
        answers = self.decode.answers("decode-0")  # listens from here on
        started = await self.prefill("prefill-0")
        self.engine, self.worker, self.life = started.engine, started.worker, started.life
        tasks = await self.enter_async_context(TaskOwner())
        tasks.start(self._read(answers), "answers")
        return self

    async def prefill(self, name: str) -> Prefill:
        engine = SimEngine(spec(Role.PREFILL, name, **self.arguments))
        return await self.start(self.make(PrefillWorker, name, engine))

    async def _read(self, answers: AsyncIterator[PrefillAnswer]) -> None:
        async for answer in answers:
            if isinstance(answer, PrefillStarted):
                self.started[answer.request_id] = answer.worker
            else:
                self.answers.setdefault(answer.request_id, []).append(answer)

    async def ask(self, request_id: str = "r", prompt: list[int] = PROMPT, block_size: int = 16) -> None:
        await self.decode.publish(PrefillRequest(request_id, "decode-0", prompt, 30.0, block_size, body()))

    async def ask_and_run(self) -> None:
        """Ask for a prefill, and return when it runs."""
        await self.ask()
        await until(lambda: self.engine.usage.running == 1)

    async def answer(self, request_id: str = "r") -> PrefillAnswer:
        await until(lambda: request_id in self.answers)
        return self.answers[request_id][0]

    async def done(self, request_id: str = "r") -> PrefillDone:
        answer = await self.answer(request_id)
        assert isinstance(answer, PrefillDone)
        return answer

    @property
    def stored(self) -> int:
        """Number of requests without an ack."""
        return len(self.decode._requests.entries)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with Scene() as scene:
        yield scene


async def test_an_answer_says_where_the_kv_lies(scene: Scene) -> None:
    """A prompt that comes again, as after a lost ack, is computed and answered again."""
    await scene.ask()
    done = await scene.done()
    assert done.handle.engine_id == "prefill-0"
    assert done.compute_seconds > 0
    handle = done.handle
    check_handle(handle, len(PROMPT), 16, LOADED)
    await until(lambda: scene.stored == 0)
    assert not await scene.engine.all_blocks_free(), "kept until they are read"
    async with sim(Role.DECODE, "decode-0") as decode:
        await decode.generate("r", PROMPT, body(), handle)
        await until(scene.engine.all_blocks_free)
    scene.decode._requests.ids.clear()
    await scene.ask()
    await until(lambda: len(scene.answers["r"]) == 2)
    assert isinstance(scene.answers["r"][1], PrefillDone)


@pytest.mark.parametrize(
    ("prompt", "block_size", "reason"),
    [(PROMPT, 32, "block-size"), ([3] * 9000, 16, "too-long"), ([], 16, "refused")],
)
async def test_an_impossible_prefill_is_refused_at_once(
    scene: Scene, prompt: list[int], block_size: int, reason: str
) -> None:
    await scene.ask("r", prompt, block_size=block_size)
    failed = await scene.answer()
    assert isinstance(failed, PrefillFailed)
    assert failed.reason == reason
    await until(lambda: scene.stored == 0)
    assert len(scene.worker._prompts._running) == 0


async def test_a_cancelled_request_is_aborted_and_acked(scene: Scene) -> None:
    scene.engine.faults.slow = 1000.0
    await scene.ask_and_run()
    await scene.decode.cancel(["r", "unknown"])
    await until(lambda: scene.stored == 0)
    await until(scene.engine.all_blocks_free)
    assert "r" not in scene.answers


@pytest.mark.parametrize("interval", [0.02, 60.0], ids=["it reports progress", "it is delivered again"])
async def test_a_prompt_is_computed_once_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    monkeypatch.setattr("pdserve.prefill.prompts.PROGRESS_INTERVAL", interval)
    async with Scene() as scene:
        scene.engine.faults.going.clear()
        await scene.ask()
        (entry,) = scene.decode._requests.entries
        if interval < scene.broker.ack_wait:
            await holds(lambda: entry.deliveries <= 1, 2 * scene.broker.ack_wait)
        else:
            await until(lambda: entry.deliveries >= 2)
        scene.engine.faults.going.set()
        await scene.done()
        await until(lambda: scene.stored == 0)
        assert len(scene.answers["r"]) == 1
        assert len(scene.worker._prompts._running) == 0


@pytest.mark.parametrize("end", ["crashed", "crashed long after", "killed"])
async def test_prompts_of_a_dead_engine_go_to_another_worker_unless_they_may_have_killed_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Prompts that ran for minutes, or whose engine was killed from outside, cannot have killed it."""
    scene.engine.faults.going.clear()
    await scene.ask_and_run()
    if end == "crashed long after":
        monkeypatch.setattr("pdserve.process.engine_checks.DEATH_NOTICED_WITHIN", -60.0)
    scene.engine.die(killed=end == "killed")
    with pytest.raises(EngineDead):
        await scene.life
    assert scene.stored == (end != "crashed")
    if end != "crashed":
        await scene.prefill("prefill-1")
        assert (await scene.done()).handle.engine_id == "prefill-1"
    else:
        failed = await scene.answer()
        assert isinstance(failed, PrefillFailed)
        assert failed.engine_died


async def test_a_worker_takes_no_more_than_its_engine_has_room_for() -> None:
    async with Scene(max_num_batched_tokens=256) as scene:
        scene.engine.faults.going.clear()
        for number in range(10):
            await scene.ask(f"r{number}")
        await until(lambda: len(scene.worker._prompts._running) == 2)
        # the second prompt fills a step of 256 tokens
        await holds(lambda: len(scene.worker._prompts._running) == 2 and scene.decode.depth == 8)
        scene.engine.faults.going.set()
        for number in range(10):
            assert await scene.done(f"r{number}")


async def test_a_drain_waits_until_kv_is_read(scene: Scene) -> None:
    """Meanwhile, the worker finishes running prompts and takes no new ones."""
    scene.engine.faults.slow = 100.0
    await scene.ask_and_run()
    scene.worker.stop()
    await until(lambda: not scene.worker.ready.is_set())
    record = (await scene.other.read("instances/"))["instances/prefill/prefill-0"]
    assert decode_instance(record).draining
    await scene.ask("new")
    done = await scene.done()
    await holds(lambda: not scene.life.done() and "new" not in scene.answers)  # the KV is unread
    async with sim(Role.DECODE, "decode-0") as decode:
        await decode.reject(done.handle)
        await asyncio.wait_for(scene.life, 5)
    assert await scene.other.read("") == {}
    await scene.prefill("prefill-1")
    assert await scene.done("new")


async def test_a_drain_ends_after_its_timeout() -> None:
    async with Scene(drain_timeout=0.1) as scene:
        scene.engine.faults.going.clear()
        await scene.ask_and_run()
        scene.worker.stop()
        await asyncio.wait_for(scene.life, 5)
        assert scene.stored == 1, "left to another worker"


@pytest.mark.usefixtures("impatient")
async def test_an_answer_is_repeated_until_its_kv_is_released(scene: Scene) -> None:
    await scene.ask()
    await until(lambda: len(scene.answers.get("r", [])) == 3)
    first, *again = scene.answers["r"]
    assert isinstance(first, PrefillDone)
    assert again == [first] * 2
    async with sim(Role.DECODE, "decode-0") as decode:
        await decode.reject(first.handle)
        await scene.worker._prompts._answers.empty()
    assert await scene.engine.all_blocks_free()
    sent = len(scene.answers["r"])
    await holds(lambda: len(scene.answers["r"]) == sent)


@pytest.mark.usefixtures("impatient")
async def test_an_answer_given_while_the_queue_is_down_is_sent_later(scene: Scene) -> None:
    scene.engine.faults.going.clear()
    await scene.ask_and_run()
    await scene.broker.down()
    scene.engine.faults.going.set()
    await until(lambda: not len(scene.worker._prompts._running))
    await scene.broker.up()
    assert await scene.done()
    assert scene.stored == 0, "it need not be computed again"


async def test_a_prefill_that_was_cancelled_too_late_is_answered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the decode worker can free the KV. The request is remembered without its prompt, because a thousand long
    prompts would take gigabytes."""

    async def too_late(request_ids: list[str]) -> None: ...

    running = scene.worker._prompts._running
    monkeypatch.setattr(scene.engine, "cancel", too_late)
    scene.engine.faults.going.clear()
    await scene.ask_and_run()
    await scene.decode.cancel(["r"])
    await until(lambda: not len(running))
    assert [(kept.prompt, kept.body) for kept in running._cancelled.values()] == [([], [])]
    scene.engine.faults.going.set()
    assert await scene.done()


async def test_an_answer_whose_kv_is_never_released_is_forgotten(scene: Scene) -> None:
    answers = AnswerSender(scene.decode)
    handle = KvHandle("prefill-0", "p", "127.0.0.1", 1, [[1]], 16, 16, lease=0.0)
    await answers.send("decode-0", PrefillDone("r", handle))
    assert list(answers.to_repeat()) == []
    await answers.empty()


async def test_a_worker_pulls_nothing_before_it_is_registered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, announce = asyncio.Event(), Presence.announce

    async def late(presence: Presence) -> None:
        await registered.wait()
        await announce(presence)

    scene.worker.stop()
    await scene.life
    monkeypatch.setattr(Presence, "announce", late)
    starting = asyncio.create_task(scene.prefill("prefill-1"))
    await scene.ask()
    await holds(lambda: scene.decode.depth == 1)
    registered.set()
    await starting
    assert await scene.done()
