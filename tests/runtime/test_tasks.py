"""Failures of background tasks are logged, counted and retried. (`test_house.py` checks that each task has an
owner.)"""

import asyncio
import logging
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from pdserve.observe.metrics import TASK_FAILURES
from pdserve.queue.jetstream import connection
from pdserve.runtime import tasks
from pdserve.util.errors import EngineDead
from tests.conditions import holds, until


def failures(task: str) -> float:
    return float(TASK_FAILURES.labels(task)._value.get())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tasks, "LAST_PAUSE", 0.01)


# owners of tasks


async def test_failed_work_runs_again_and_logs_each_type_of_error_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 5:
            raise ValueError("another")
        if runs == 8:
            raise asyncio.CancelledError  # as some libraries do, though the task was not cancelled
        if runs == 9:
            return
        raise KeyError(runs)

    before = failures("some work")
    owner = tasks.TaskOwner()
    owner.forever(work, "some work: of a test")
    await until(lambda: runs > 12)
    await owner.stop()
    assert failures("some work") - before >= 12
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        KeyError,
        ValueError,
        asyncio.CancelledError,
        RuntimeError,
    ]
    await holds(lambda: runs <= 14)


async def test_work_until_done_ends_on_return_and_other_work_by_a_dead_engine() -> None:
    errors = [KeyError("not expected")]

    async def work() -> None:
        if errors:
            raise errors.pop()

    await asyncio.wait_for(tasks.forever(work, "work", until_done=True), 1)

    async def dead() -> None:
        raise EngineDead("dead")

    with pytest.raises(EngineDead):
        await tasks.forever(dead, "work")


async def test_a_dead_engine_inside_an_exception_group_is_raised() -> None:
    """`isolate_errors` around the group lets the error pass."""

    async def dead() -> None:
        raise EngineDead("dead")

    async def work() -> None:
        with tasks.isolate_errors("some members"):
            async with asyncio.TaskGroup() as group:
                group.create_task(tasks.forever(dead, "inner work"))

    with pytest.raises(EngineDead):
        await asyncio.wait_for(tasks.forever(work, "work"), 10)


async def _lost_in_a_finally() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise KeyError


async def _lost_in_a_block() -> None:
    with tasks.isolate_errors("some members"):
        await _lost_in_a_finally()
    await asyncio.Event().wait()


async def _swallowed_twice() -> None:
    for _ in range(2):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.Event().wait()


@pytest.mark.parametrize("work", [_lost_in_a_finally, _lost_in_a_block, _swallowed_twice])
async def test_a_swallowed_cancellation_still_ends_the_task(
    work: tasks.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_INTERVAL", 0.01)
    task = asyncio.ensure_future(tasks.forever(work, "work"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    async with tasks.TaskOwner() as owner:
        once = owner.start(_swallowed_twice(), "once")
        await asyncio.sleep(0)
    assert once.cancelled()


async def test_work_that_returns_runs_again_after_a_pause(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.3)
    before, starts = failures("a life"), list[float]()

    async def work() -> None:
        starts.append(time.monotonic())
        if len(starts) == 2:
            raise KeyError

    async with tasks.TaskOwner() as owner:
        owner.forever(work, "a life", again_after=0.1)
        await until(lambda: len(starts) == 4)
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert all(pause >= least for pause, least in zip(pauses, [0.09, 0.29, 0.09], strict=True))
    assert failures("a life") == before + 1
    assert caplog.text.count("a life failed") == 1


@pytest.mark.parametrize(
    "failure", [KeyError("x"), asyncio.CancelledError()], ids=["raises", "a library cancels"]
)
async def test_a_single_run_that_fails_is_reported(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        raise failure

    reported: list[BaseException] = []
    async with tasks.TaskOwner() as owner:
        owner.start(work(), "work", reported.append)
        await until(lambda: bool(reported))
        before = failures("work")
        stopped = owner.start(asyncio.sleep(60), "work", reported.append)
    assert stopped.cancelled()
    assert (len(reported), failures("work")) == (1, before), "a stopped run is no failure"
    assert "work failed" in caplog.text


async def test_an_isolated_error_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    before, done = failures("some members"), []
    for member in range(5):
        with tasks.isolate_errors("some members: of a test") as one:
            if member % 2:
                raise KeyError(member)
            done.append(member)
        assert (one.error is not None) == bool(member % 2)
    assert done == [0, 2, 4]
    assert failures("some members") == before + 2
    assert [record.filename for record in caplog.records if record.exc_info] == ["test_tasks.py"] * 2


@pytest.mark.parametrize("passes", [EngineDead("dead"), asyncio.CancelledError()])
async def test_dead_engines_and_cancellations_are_not_isolated(passes: BaseException) -> None:
    with pytest.raises(type(passes)), tasks.isolate_errors("some members"):
        raise passes


# message handlers


async def test_errors_in_nats_message_handlers_are_logged(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(_: Any) -> None:
        raise KeyError("not expected")

    async with connection.NatsConnection(nats_url, None, "nothing happens") as connected:
        connected.listen("pdserve.test.handler", handler)
        await connected.publish("pdserve.test.handler", b"x")
        await until(lambda: "error in a message handler" in caplog.text)
        assert connected.connected
        assert logging.getLevelName(caplog.records[-1].levelno) == "ERROR"
