"""Warms up KV transfers from at most `MAX_PAIRS` prefill workers, before a client's request needs them.

The first read between two workers shakes hands, connects and allocates, which may take seconds. So this decode worker
sends each of these prefill workers a short random prompt directly, reads its KV, and generates one token. A new worker
warms up before frontends see it: it is registered as a newcomer. It waits a few seconds at most for warm-ups
(docs/decisions/0008-warm-up.md)."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from functools import partial

from pdserve.contract.messages import Submit
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.remote.client import RemotePrefill
from pdserve.decode.requests import DecodeRequest, DecodeRequests, Phase
from pdserve.engine.base import Engine
from pdserve.observe.metrics import WARM_UPS
from pdserve.process.engine_checks import unique_prompt
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import forever
from pdserve.util.errors import ProtocolError, error_text

logger = logging.getLogger(__name__)

TIMEOUT = 15.0
"""Seconds that a whole warm-up may take; a stalled read is given up earlier."""
FIRST_RETRY, LAST_RETRY = 1.0, 60.0
"""Seconds between two tries: doubled after each, up to `LAST_RETRY`."""


@dataclass(eq=False)
class WarmUp:
    engine: Engine
    view: RegistryView
    workers: PrefillWorkers
    remote: RemotePrefill
    requests: DecodeRequests
    _tried: set[str] = field(default_factory=set)
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Warm up with each worker of `to_warm_up`, and retry if that fails; for ever, or until EngineDead."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for _ in self.view.changes():
                peers = self.workers.to_warm_up()
                for gone in tasks.keys() - peers:
                    tasks.pop(gone).cancel()
                    self._tried.discard(gone)
                self._change.set()
                for peer in peers - tasks.keys():
                    retries = forever(partial(self._retry, peer), f"warm-up: {peer}", until_done=True)
                    tasks[peer] = group.create_task(retries)

    async def tried(self) -> None:
        """Wait until each worker of `to_warm_up` has been tried."""
        while not self.workers.to_warm_up() <= self._tried:
            self._change.clear()
            await self._change.wait()

    async def _retry(self, peer: str) -> None:
        pause = FIRST_RETRY
        while not await self._try(peer):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY)

    async def _try(self, peer: str) -> bool:
        began = time.monotonic()
        name, prompt = f"warm-up-{secrets.token_hex(8)}", unique_prompt(self.engine.facts)
        submit = Submit(name, prompt, TIMEOUT, self.engine.plain_body(1))
        request = self.requests.add("", submit, warm_up_with=peer)
        assert request is not None
        try:
            async with asyncio.timeout(TIMEOUT):
                warm = await self._read(request)
        except (TimeoutError, ProtocolError) as error:
            logger.warning("warm-up with %s: %s", peer, error_text(error, "it took too long"))
            warm = False
        finally:
            if not request.over.is_set():
                self.requests.drop(request)
                await self.engine.cancel([request.id])
        WARM_UPS.labels(self.workers.model, "ok" if warm else "failed").inc()
        result = "done" if warm else "failed"
        logger.info("warm-up with %s: %s after %.2f s", peer, result, time.monotonic() - began)
        self._tried.add(peer)
        self._change.set()
        return warm

    async def _read(self, request: DecodeRequest) -> bool:
        done = await self.remote.prefill(request)
        if done is None:
            return False
        if request.cancelled:
            await self.engine.reject(done.handle)
            return False
        request.phase = Phase.RUNNING
        submit = request.submit
        await self.engine.generate(request.id, submit.prompt, submit.body, done.handle)
        await request.over.wait()
        return not (request.kv_unread or request.failure or request.cancelled)
