"""Storing a request in the stream, once: it is tried again where that may help, and what may have been stored all the
same is withdrawn."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import nats.js.errors
from nats.aio.client import Client
from nats.js.api import PubAck

from pdserve.contract.messages import PrefillCancel, PrefillRequest, encode
from pdserve.queue.jetstream.client import PASSING, cancellable
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.queue.jetstream.stream import TOO_MANY
from pdserve.util.errors import QueueFull, QueueUnavailable

WITHDRAW_FOR = 30.0
"""seconds for which the cancellation of a request that may have been stored is repeated"""
PAUSE = 0.1
"""seconds between two tries, while a stream's leader hands over"""
LEAST = 0.1
"""seconds that the last try gets"""


class Publisher:
    """`ensure` makes the stream where it is missing; `timeout` is for all tries together, in seconds."""

    def __init__(
        self, connection: NatsConnection, timeout: float, ensure: Callable[[Client], Awaitable[None]]
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._ensure = ensure
        self._unsure: dict[str, float] = {}
        """by id, the requests whose storing was not confirmed: until when to withdraw them, in monotonic seconds"""

    async def publish(self, subject: str, request: PrefillRequest) -> int:
        """Return its sequence. The server takes what comes twice under one id for one request. Raises QueueFull and
        QueueUnavailable."""
        client: Client | None = self._connection.client()
        payload, ends, unsure = encode(request), time.monotonic() + self._timeout, False
        for attempt in count():
            assert client is not None
            try:
                within = max(LEAST, ends - time.monotonic())
                return (await self._store(client, subject, request, payload, within)).seq
            except (*PASSING, QueueUnavailable) as error:
                problem = error
            if getattr(problem, "err_code", None) == TOO_MANY:
                raise QueueFull("the queue is full") from problem
            refused = isinstance(problem, nats.js.errors.Error)
            unsure |= not refused
            client = await self._for_another_try(client, attempt, refused, ends)
            if client is None:
                break
        if unsure:
            self._unsure[request.request_id] = time.monotonic() + min(request.timeout, WITHDRAW_FOR)
        raise QueueUnavailable(f"NATS did not store the request: {_said(problem)}") from problem

    async def _store(
        self, client: Client, subject: str, request: PrefillRequest, payload: bytes, within: float
    ) -> PubAck:
        await self._connection.subscribe()
        # the server removes it at its deadline, also where no prefill worker is left to drop it
        headers = {"Nats-Msg-Id": request.request_id, "Nats-TTL": f"{max(1, math.ceil(request.timeout))}s"}
        js = client.jetstream()
        return await self._connection.unless_lost(
            js.publish(subject, payload, timeout=within, headers=headers)
        )

    async def _for_another_try(
        self, client: Client, attempt: int, refused: bool, ends: float
    ) -> Client | None:
        """Return the client for it; None where it would not help. What was refused was not stored: the stream was
        changed or deleted, or its leader hands over. A cluster has other servers."""
        if refused and not attempt:
            with suppress(*PASSING):
                async with asyncio.timeout(ends - time.monotonic()):
                    await cancellable(self._ensure(client))
            return client
        if not self._connection.of_cluster or time.monotonic() >= ends:
            return None
        if refused and time.monotonic() + PAUSE < ends:
            await asyncio.sleep(PAUSE)
            return client
        self._connection.leave(client)
        return await self._connection.client_until(ends)

    async def withdraw_unsure(self, client: Client, notices: str) -> None:
        """Cancel the requests that were not confirmed: they count as failed here, so no worker needs to compute them.
        Repeated, because after an outage the prefill workers may be back later than this process."""
        now = time.monotonic()
        self._unsure = {request: until for request, until in self._unsure.items() if until > now}
        if self._unsure:
            await client.publish(notices, encode(PrefillCancel(list(self._unsure))))


def _said(problem: Exception) -> str:
    return getattr(problem, "description", None) or str(problem) or "no answer in time"
