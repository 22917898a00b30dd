"""A decode worker on two hosts, as its processes see it, with simulated engines."""

import asyncio
import signal
from asyncio.subprocess import PIPE, Process

from pdserve.records import Role
from tests.conditions import until
from tests.process.test_standalone import TOKENS, Alone, _asked, alone

__all__ = ["alone"]
SPANS = "VllmWorker: {tensor-parallel-size: 2, nnodes: 2, "


async def _started(alone: Alone, *options: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *alone.command(Role.DECODE), *options, env=alone.env, stderr=PIPE
    )


async def test_a_follower_that_is_asked_to_stop_lets_requests_finish_and_ends_with_its_leader(
    alone: Alone,
) -> None:
    file = alone.file
    file.write_text(file.read_text().replace("VllmWorker: {", SPANS))
    follower = await _started(alone, "--node-rank", "1")
    leader = await _started(alone)
    async with alone.view() as view:
        answer = await _asked(view)
        assert [worker.id.rpartition("-")[0] for worker in view.instances()] == ["decode-0"]
        follower.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(answer, 30) == TOKENS
        said = [await asyncio.wait_for(each.communicate(), 60) for each in (leader, follower)]
        assert (leader.returncode, follower.returncode) == (0, 0), said
        await until(lambda: not view.instances())
