"""What a decode worker tells its frontends, and the end of requests that do not come to their last output: cancelled,
failed, past their deadline, or lost with their frontend or the engine."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from pdserve.decode.prefill_workers import PrefillWorkers
from pdserve.decode.quarantine import Quarantine
from pdserve.decode.requests import CANCELLED, DecodeRequest, DecodeRequests, Phase
from pdserve.engine.base import Engine
from pdserve.errors import EngineDead, PeerGone
from pdserve.messages import Failed, ToFrontend
from pdserve.process.engine_checks import may_have_killed
from pdserve.stream.base import StreamServer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Frontends:
    engine: Engine
    stream: StreamServer
    workers: PrefillWorkers
    requests: DecodeRequests
    quarantine: Quarantine

    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Warm-ups are of no frontend."""
        if not frontend:
            return
        try:
            await self.stream.send(frontend, message)
        except PeerGone:
            await self.forget(frontend)

    async def forget(self, frontend: str) -> None:
        """This frontend is gone."""
        gone = [request for request in self.requests.of(frontend) if not request.cancelled]
        if gone:
            log.warning("frontend %s is gone: cancelling its %d requests", frontend, len(gone))
        for request in gone:
            await self.cancel(request)

    async def cancel(self, request: DecodeRequest) -> None:
        """While the request is not in the engine yet, `RequestRunner` sees `cancelled` and drops it."""
        request.cancelled = True
        self.quarantine.leave(request)
        if request.phase is Phase.RUNNING:
            self.requests.drop(request)
            await self.engine.cancel([request.id])
        else:
            request.resolve(CANCELLED)

    async def end(self, request: DecodeRequest, message: str, *, retry: bool) -> None:
        """Fail a request that is still alive."""
        await self.send(request.frontend, Failed(request.id, message, retry))
        await self.cancel(request)

    async def fail(self, request: DecodeRequest, message: str, *, retry: bool, invalid: bool = False) -> None:
        """Fail a request that the engine does not have (any more)."""
        request.failed = True
        self.requests.drop(request)
        self.quarantine.leave(request)
        if not request.cancelled:
            await self.send(request.frontend, Failed(request.id, message, retry, invalid))

    async def watch_deadlines(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(1.0)
            self.workers.give_up_lost()
            for request in self.requests:
                if time.monotonic() >= request.deadline:
                    await self.end(request, "the request's deadline passed", retry=False)

    async def engine_died(self, death: EngineDead) -> None:
        """Tell every frontend what it loses, and which requests the engine was computing: the last messages of this
        worker."""
        for request in self.requests.clients():
            running = request.phase is Phase.RUNNING
            blamed = running and may_have_killed(len(request.submit.prompt), request.since)
            text, died = f"the engine died: {death}", request.engines_died + blamed
            with suppress(PeerGone):
                await self.stream.send(
                    request.frontend, Failed(request.id, text, retry=True, engines_died=died)
                )
