"""Publishes requests to the JetStream stream. Retries if that may help, and cancels a request that may have been stored
although publishing it failed."""

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
from pdserve.queue.jetstream.stream import STREAM_FULL
from pdserve.util.errors import QueueFull, QueueUnavailable

WITHDRAW_FOR = 30.0
"""Maximum of seconds for which a cancellation is repeated."""
LEADER_CHANGE_PAUSE = 0.1
"""Seconds between two attempts while the stream changes its leader."""
MIN_TIMEOUT = 0.1
"""Shortest timeout of an attempt in seconds."""


class Publisher:
    """`ensure` recreates a missing stream; `timeout` bounds all attempts together, in seconds."""

    def __init__(
        self, connection: NatsConnection, timeout: float, ensure: Callable[[Client], Awaitable[None]]
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._ensure = ensure
        self._unsure: dict[str, float] = {}
        """by request id: monotonic time until which to withdraw a request whose storing was not confirmed"""

    async def publish(self, subject: str, request: PrefillRequest) -> int:
        """Return the request's sequence. The server drops duplicates by the request's id. Raises QueueFull and
        QueueUnavailable."""
        client: Client | None = self._connection.client()
        payload, ends, unsure = encode(request), time.monotonic() + self._timeout, False
        for attempt in count():
            assert client is not None
            try:
                within = max(MIN_TIMEOUT, ends - time.monotonic())
                return (await self._store(client, subject, request, payload, within)).seq
            except (*PASSING, QueueUnavailable) as error:
                problem = error
            if getattr(problem, "err_code", None) == STREAM_FULL:
                raise QueueFull("the queue is full") from problem
            refused = isinstance(problem, nats.js.errors.Error)
            unsure |= not refused
            client = await self._retry_client(client, attempt, refused, ends)
            if client is None:
                break
        if unsure:
            self._unsure[request.request_id] = time.monotonic() + min(request.timeout, WITHDRAW_FOR)
        raise QueueUnavailable(f"NATS did not store the request: {_describe(problem)}") from problem

    async def _store(
        self, client: Client, subject: str, request: PrefillRequest, payload: bytes, within: float
    ) -> PubAck:
        await self._connection.subscribe()
        # Nats-TTL: the server removes the request at its deadline, even if no prefill worker pulls
        headers = {"Nats-Msg-Id": request.request_id, "Nats-TTL": f"{max(1, math.ceil(request.timeout))}s"}
        js = client.jetstream()
        return await self._connection.unless_lost(
            js.publish(subject, payload, timeout=within, headers=headers)
        )

    async def _retry_client(self, client: Client, attempt: int, refused: bool, ends: float) -> Client | None:
        """Return the client for the next attempt; None if another attempt would not help. A refused request was not
        stored: the stream was changed or deleted, or is changing its leader. In a cluster, a request without an answer
        is sent to another server."""
        if refused and not attempt:
            with suppress(*PASSING):
                async with asyncio.timeout(ends - time.monotonic()):
                    await cancellable(self._ensure(client))
            return client
        if not self._connection.of_cluster or time.monotonic() >= ends:
            return None
        if refused and time.monotonic() + LEADER_CHANGE_PAUSE < ends:
            await asyncio.sleep(LEADER_CHANGE_PAUSE)
            return client
        self._connection.leave(client)
        return await self._connection.client_until(ends)

    async def withdraw_unsure(self, client: Client, notices: str) -> None:
        """Cancel the unconfirmed requests. Call it repeatedly, because prefill workers may reconnect later than this
        process."""
        now = time.monotonic()
        self._unsure = {request: until for request, until in self._unsure.items() if until > now}
        if self._unsure:
            await client.publish(notices, encode(PrefillCancel(list(self._unsure))))


def _describe(problem: Exception) -> str:
    return getattr(problem, "description", None) or str(problem) or "no answer in time"
