"""A suspect enters the engine alone; other requests enter together."""

import asyncio

import pytest

from pdserve.contract.messages import Submit
from pdserve.decode.requests import DecodeRequest
from pdserve.decode.scheduling.quarantine import Quarantine


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(["a b c | abc"], id="requests without suspicion run together"),
        pytest.param(
            ["a b X Y c d | ab", "-a | ab", "-b | abX", "-X | abXY", "-Y | abXYcd"],
            id="a suspect waits for earlier requests to get a token; later requests wait for suspects",
        ),
        pytest.param(
            ["X Y Z a | X", "!Y | X", "!X | XZ", "-Z -Z | XZa"],
            id="a cancelled suspect holds up no other request",
        ),
    ],
)
async def test_requests_that_enter_the_engine(story: list[str]) -> None:
    """`a`: a request arrives; `A`: a suspect; `-a`: it has a token; `!a`: it is cancelled; after `|`: all that
    entered."""
    quarantine, requests, entered = Quarantine(), dict[str, DecodeRequest](), list[str]()

    async def enter(request: DecodeRequest) -> None:
        await quarantine.enter(request)
        if not request.cancelled:
            entered.append(request.id)

    async with asyncio.TaskGroup() as tasks:
        for step in story:
            words, _, inside = step.partition(" | ")
            for word in words.split():
                name = word[-1]
                if word == name:
                    died = int(name.isupper())
                    requests[name] = DecodeRequest("f", Submit(name, [1], 0.0, []), engines_died=died)
                    tasks.create_task(enter(requests[name]))
                else:
                    requests[name].cancelled = word[0] == "!"
                    quarantine.leave(requests[name])
            for _ in range(5):
                await asyncio.sleep(0)
            assert "".join(entered) == inside, step
