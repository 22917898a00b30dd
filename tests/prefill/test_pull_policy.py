import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.contract.messages import PrefillRequest
from pdserve.prefill.pull_policy import LOOK, TICK, Beside, Pulling, pause
from pdserve.prefill.running import RunningPrefills
from pdserve.queue.base import Delivery
from pdserve.util.errors import QueueUnavailable


@pytest.mark.parametrize(
    ("streams", "prompt_seconds", "waiting", "seconds"),
    [
        (0, 0.1, 0, 0.0),  # idle: at once
        (0, 100.0, 5, 0.0),
        (1, 0.1, 0, LOOK),  # none is known to wait: a look now and then
        (32, 0.0, 0, LOOK),
        (2, 0.2, 1, 0.05),  # a quarter of its places: a quarter of what a prompt takes
        (4, 0.08, 3, 0.04),
        (8, 0.08, 1, 0.08),  # full
        (8, 0.0, 1, TICK),  # no prompt was computed here so far
        (8, 100.0, 1, LOOK),  # nothing starves
    ],
)
def test_how_long_a_worker_leaves_the_queue_to_others(
    streams: int, prompt_seconds: float, waiting: int, seconds: float
) -> None:
    assert pause(streams, 8, prompt_seconds, waiting) == pytest.approx(seconds)


@pytest.mark.parametrize("end", ["the engine gets a stream", "the queue is away", "it is cancelled"])
async def test_a_prompt_is_not_lost_where_the_look_for_a_second_one_ends(end: str) -> None:
    prompt = Delivery(PrefillRequest("first", "decode", [1], 60.0, 16, [], behind=1))

    async def pull(limit: int, wait: float, worker: object) -> list[Delivery]:
        if wait:
            return [prompt]
        if end == "the queue is away":
            raise QueueUnavailable(end)
        if end == "it is cancelled":
            assert pulling.drop(["first", "another"]) == [prompt]
            return []
        pulling.stop_waiting()
        await asyncio.sleep(0.01)
        return []

    engine = SimpleNamespace(
        facts=SimpleNamespace(max_num_seqs=8, max_batched_tokens=512, kv_tokens=4096),
        usage=SimpleNamespace(kv_usage=0.0),
    )
    queue = cast(Any, SimpleNamespace(pull=pull, depth=1))
    pulling = Pulling("prefill-0", cast(Any, engine), queue, RunningPrefills(cast(Any, None)), Beside)
    await pulling.next()
    assert pulling.held == ([] if end == "it is cancelled" else [prompt])
