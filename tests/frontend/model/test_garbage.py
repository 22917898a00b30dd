"""When a frontend runs a full garbage collection."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from pdserve.frontend.model import garbage
from pdserve.runtime.tasks import TaskOwner
from tests.conditions import holds, until


class Node:
    """A reference cycle, which only a full collection frees once it is in the oldest generation."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def full() -> Iterator[list[str]]:
    """Record full collections. Restore the collector afterwards."""
    seen: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(phase)

    before = gc.get_threshold()
    garbage.freeze()
    gc.callbacks.append(count)
    yield seen
    gc.callbacks.remove(count)
    gc.set_threshold(*before)
    gc.unfreeze()


async def test_no_full_collection_runs_during_a_request_that_makes_many_objects(
    full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "IDLE_CHECK_INTERVAL", 0.001)
    requests = 1
    async with TaskOwner() as tasks:
        tasks.start(garbage.collect_when_idle(lambda: requests), "collecting")
        answer = [[position] for position in range(100 * garbage.YOUNG)]
        await holds(lambda: not full, 0.05)
        node = weakref.ref(Node())
        del answer
        requests = 0
        await until(lambda: bool(full) and node() is None)


async def test_a_full_collection_runs_after_max_delay_during_requests(
    full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "IDLE_CHECK_INTERVAL", 0.001)
    monkeypatch.setattr(garbage, "MAX_DELAY", 0.01)
    async with TaskOwner() as tasks:
        tasks.start(garbage.collect_when_idle(lambda: 1), "collecting")
        node = weakref.ref(Node())
        await until(lambda: bool(full) and node() is None)
