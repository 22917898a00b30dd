"""Suspects go into the engine alone; everything else goes together."""

import asyncio

from pdserve.decode.quarantine import Quarantine
from pdserve.decode.requests import DecodeRequest
from pdserve.messages import Submit


class Engine:
    """What is in it, by name; a suspect's name is in capitals."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self.inside: list[str] = []
        self._requests: dict[str, DecodeRequest] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def bring(self, *names: str) -> None:
        for name in names:
            submit = Submit(name, [1], 0.0, [])
            request = DecodeRequest("f", submit, engines_died=int(name.isupper()))
            self._requests[name] = request
            self._tasks.append(asyncio.create_task(self._enter(request)))
        await self._settle()

    async def _enter(self, request: DecodeRequest) -> None:
        await self.quarantine.enter(request)
        if not request.cancelled:
            self.inside.append(request.id)

    async def prove(self, *names: str) -> None:
        for name in names:
            self.quarantine.leave(self._requests[name])
        await self._settle()

    async def cancel(self, name: str) -> None:
        self._requests[name].cancelled = True
        self.quarantine.leave(self._requests[name])
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_requests_without_suspicion_run_together() -> None:
    engine = Engine()
    await engine.bring("a", "b", "c")
    assert engine.inside == ["a", "b", "c"]


async def test_a_suspect_waits_for_the_unproven_and_others_for_it() -> None:
    engine = Engine()
    await engine.bring("a", "b", "X", "Y", "c", "d")
    assert engine.inside == ["a", "b"]
    await engine.prove("a")
    assert engine.inside == ["a", "b"]
    await engine.prove("b")
    assert engine.inside[2:] == ["X"]
    await engine.prove("X")
    assert engine.inside[3:] == ["Y"]
    await engine.prove("Y")
    assert engine.inside[4:] == ["c", "d"]


async def test_a_cancelled_suspect_holds_up_no_other_request() -> None:
    engine = Engine()
    await engine.bring("X", "Y", "Z", "a")
    await engine.cancel("Y")
    assert engine.inside == ["X"]
    await engine.cancel("X")
    assert engine.inside == ["X", "Z"]
    await engine.prove("Z", "Z")
    assert engine.inside == ["X", "Z", "a"]
