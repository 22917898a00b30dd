"""A model's prefill queue on NATS: requests in a JetStream work-queue stream, the rest on core subjects."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pdserve.contract.messages import (
    PrefillAnswer,
    PrefillCancel,
    PrefillLoad,
    PrefillRequest,
    QueueState,
    ToPrefill,
    decode_prefill_answer,
    decode_prefill_request,
    decode_queue_state,
    decode_to_prefill,
    encode,
)
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.depth import Puller, QueueDepth
from pdserve.queue.jetstream.acks import Acks, JetStreamDelivery
from pdserve.queue.jetstream.client import cancellable
from pdserve.queue.jetstream.connection import NatsConnection, SubjectMessages
from pdserve.queue.jetstream.consumer_pull import ANSWER_WITHIN, ConsumerMissing, PullConsumer
from pdserve.queue.jetstream.held import HeldCounts
from pdserve.queue.jetstream.publish import Publisher
from pdserve.queue.jetstream.stream import (
    CONSUMER,
    MEASURE_EVERY,
    REPLICAS,
    QueueNames,
    ServerClock,
    StreamLimits,
    ensure,
    measure,
    read_state,
    remove_abandoned,
    require_jetstream,
)
from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import Credentials
from pdserve.util.errors import ProtocolError, QueueUnavailable
from pdserve.util.lru import LruDict
from pdserve.util.net import split_servers

logger = logging.getLogger(__name__)

_CANCELLED = 20_000
"""ids of cancelled requests that are remembered"""
_PULLERS = 1000
"""prefill workers whose load is remembered"""


class JetStreamQueue(PrefillQueue):
    def __init__(
        self,
        nats: str,
        namespace: str,
        model: str,
        limits: StreamLimits | None = None,
        credentials: Credentials | None = None,
        meanwhile: str = "",
        replicas: int | None = None,
    ) -> None:
        self._names = QueueNames(namespace, model)
        self._limits = limits or StreamLimits()
        self._replicas = replicas or (REPLICAS if len(split_servers(nats)) >= REPLICAS else None)
        tls = credentials.client if credentials else None
        self._connection = NatsConnection(nats, tls, meanwhile, self._prepare)
        self._acks = Acks(self._connection)
        self._publisher = Publisher(self._connection, self._limits.publish_timeout, self._ensure)
        self._puller = PullConsumer(self._connection, self._names.stream, CONSUMER)
        self._depth = QueueDepth()
        self._held = HeldCounts(self._connection)
        self._loads: LruDict[tuple[PrefillLoad, float]] = LruDict(_PULLERS)
        self._made: datetime | None = None
        """when the stream was made, by the server's clock"""
        self._ensured = 0.0
        """when the stream was last compared with what it should be, in monotonic seconds"""
        self._reported_at = 0.0
        """when the depth was last reported or asked for, in monotonic seconds"""
        self._cancelled: LruDict[None] = LruDict(_CANCELLED)
        self._notices: SubjectMessages | None = None
        self._inboxes: dict[str, SubjectMessages] = {}
        self._clock: ServerClock | None = None

    def bind(self, fingerprint: str) -> None:
        self._names = replace(self._names, fingerprint=fingerprint)
        self._puller = PullConsumer(self._connection, self._names.stream, CONSUMER)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._connection.listen(self._names.state, self._on_state)
        self._connection.listen(self._names.held, self._held.take)
        async with self._connection, TaskOwner() as tasks:
            tasks.forever(self._keep_depth_true, "queue depth")
            tasks.forever(partial(self._held.report, self._names.held), "held requests")
            yield

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def stored(self) -> int:
        return self._depth.value

    @property
    def depth(self) -> int:
        return self.stored + self._held.total

    @property
    def loads(self) -> Mapping[str, tuple[PrefillLoad, float]]:
        return self._loads

    @property
    def losses(self) -> int:
        return self._acks.losses

    async def _prepare(self, client: Client) -> None:
        """Set up each new connection: the server may be another one, or have lost its data."""
        self.max_payload = client.max_payload
        await require_jetstream(client, self._connection.url)
        await self._ensure(client)
        await remove_abandoned(client, self._names, self._limits)
        await self._sync(client)
        self._clock = None
        await self._measure_clock(client)
        await self._acks.repeat(client)
        await self._publisher.withdraw_unsure(client, self._names.notices)

    async def _ensure(self, client: Client) -> None:
        await ensure(client, self._names, self._limits, self._replicas)
        self._ensured = time.monotonic()

    # depth

    async def _on_state(self, message: Msg) -> None:
        self._reported_at = time.monotonic()
        try:
            state = decode_queue_state(message.data)
        except ProtocolError as error:
            logger.warning("queue state skipped: %s", error)
            return
        self._depth = self._depth.reported(state)
        if state.worker:
            self._loads[state.worker] = state.load, self._reported_at

    async def _sync(self, client: Client) -> None:
        asked = self._depth
        made, stored, state = await read_state(client, self._names)
        if (self._made is not None and made != self._made) or stored < asked.last:
            self._acks.lost()
        self._made = made
        self._depth = self._depth.synced(stored, state, asked)
        self._reported_at = time.monotonic()

    async def _keep_depth_true(self) -> None:
        """Ask the server while the queue seems to stand still: without prefill workers nothing reports the depth, and
        requests that the server dropped are reported to no worker. And set the stream back where it was changed."""
        while True:
            await asyncio.sleep(self._limits.resync)
            if not self.connected:
                continue
            try:
                client = self._connection.client()
                await self._publisher.withdraw_unsure(client, self._names.notices)
                await self._acks.repeat(client)
                if not self._clock or time.monotonic() - self._clock.measured >= MEASURE_EVERY:
                    await self._measure_clock(client)
                if time.monotonic() - self._ensured >= self._limits.check:
                    await cancellable(self._ensure(client))
                    await cancellable(self._sync(client))
                elif self.stored and time.monotonic() - self._reported_at >= self._limits.resync:
                    await cancellable(self._sync(client))
            except (nats.errors.Error, QueueUnavailable, TimeoutError) as error:
                logger.debug("queue depth: %s", error)
                self._connection.leave(client)

    async def _measure_clock(self, client: Client) -> None:
        self._clock = await cancellable(measure(client, self._names.stream)) or self._clock

    # decode side

    def hold(self, requests: int) -> None:
        self._held.hold(requests)

    async def publish(self, request: PrefillRequest) -> None:
        sequence = await self._publisher.publish(self._names.requests, request)
        self._depth = self._depth.published(sequence)

    def answers(self, instance: str) -> AsyncIterator[PrefillAnswer]:
        return self._connection.decoded(self._inbox(self._names.answers(instance)), decode_prefill_answer)

    async def cancel(self, request_ids: list[str]) -> None:
        await self._connection.publish(self._names.notices, encode(PrefillCancel(request_ids)))

    async def warm_up(self, worker: str, request: PrefillRequest) -> None:
        await self._connection.publish(self._names.warm_ups(worker), encode(request))

    async def listens(self, worker: str) -> bool:
        client = self._connection.client()
        try:
            await cancellable(client.request(self._names.warm_ups(worker), b"", timeout=ANSWER_WITHIN))
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise TimeoutError(f"{worker} does not answer") from error
        except nats.errors.Error:
            return True
        return True

    # prefill side

    async def expect_warm_ups(self, instance: str) -> None:
        self._inbox(self._names.warm_ups(instance))
        with suppress(QueueUnavailable):
            await self._connection.flush_subscriptions()

    def warm_ups(self, instance: str) -> AsyncIterator[PrefillRequest]:
        return self._connection.decoded(self._inbox(self._names.warm_ups(instance)), decode_prefill_request)

    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        self._listen_to_notices()
        ends = time.monotonic() + wait
        while True:
            messages = await self._fetch(limit, ends - time.monotonic())
            try:
                accepted = [await self._accept(message) for message in messages]
                deliveries = [delivery for delivery in accepted if delivery]
                await self._broadcast(messages, deliveries, worker)
            except asyncio.CancelledError:
                with suppress(QueueUnavailable):
                    for message in messages:  # to another worker at once
                        await self._connection.publish(message.reply, b"-NAK")
                raise
            if deliveries or time.monotonic() >= ends:
                return deliveries

    async def _fetch(self, limit: int, wait: float) -> list[Msg]:
        client = self._connection.client()
        with suppress(ConsumerMissing):
            return await self._puller.fetch(limit, wait)
        try:
            await cancellable(self._ensure(client))
            return await self._puller.fetch(limit, wait)
        except (ConsumerMissing, nats.errors.Error) as error:
            self._connection.leave(client)
            raise QueueUnavailable(f"the queue's stream cannot be used: {error}") from error

    async def _broadcast(
        self, messages: list[Msg], deliveries: list[Delivery], worker: Puller | None
    ) -> None:
        seen = [message.metadata for message in messages]
        if newest := max(seen, key=lambda metadata: metadata.sequence.stream, default=None):
            state = QueueState(newest.sequence.stream, newest.num_pending)
            if worker is not None:
                load = worker.load_with(delivery.request for delivery in deliveries)
                state = msgspec.structs.replace(state, worker=worker.id, load=load)
            await self._connection.publish(self._names.state, encode(state))

    async def _accept(self, message: Msg) -> Delivery | None:
        """Return None if the request needs no work any more."""
        try:
            request = decode_prefill_request(message.data)
        except ProtocolError as error:
            logger.error(
                "prefill request %d dropped, it cannot be read: %s", message.metadata.sequence.stream, error
            )
            await self._connection.publish(message.reply, b"+TERM")
            return None
        delivery = JetStreamDelivery(self._acks, self._clock, message, request)
        deliveries = message.metadata.num_delivered
        if deliveries > self._limits.max_deliver:
            logger.error(
                "request %s dropped after %d deliveries without an answer", request.request_id, deliveries - 1
            )
        elif delivery.deadline <= time.monotonic():
            logger.info("request %s dropped: its deadline is over", request.request_id)
        elif request.request_id in self._cancelled:
            logger.debug("request %s dropped: cancelled", request.request_id)
        else:
            return delivery
        await delivery.ack()
        return None

    async def answer(self, instance: str, answer: PrefillAnswer) -> None:
        await self._connection.publish(self._names.answers(instance), encode(answer))

    def notices(self) -> AsyncIterator[ToPrefill]:
        return self._connection.decoded(self._listen_to_notices(), decode_to_prefill)

    def _listen_to_notices(self) -> SubjectMessages:
        """Listen once, both to skip requests that were cancelled in the queue and to pass the notices on."""
        if self._notices is None:
            inbox = self._notices = SubjectMessages(self._names.notices)

            async def note(message: Msg) -> None:
                with suppress(ProtocolError):
                    notice = decode_to_prefill(message.data)
                    if isinstance(notice, PrefillCancel):
                        self._cancelled.update(dict.fromkeys(notice.request_ids))
                await inbox.take(message)

            self._connection.listen(self._names.notices, note)
        return self._notices

    # listening

    def _inbox(self, subject: str) -> SubjectMessages:
        """A reader that starts again gets the same inbox, with the messages that came meanwhile."""
        if subject not in self._inboxes:
            inbox = self._inboxes[subject] = SubjectMessages(subject)

            async def take(message: Msg) -> None:
                if message.data:
                    await inbox.take(message)
                    return
                with suppress(QueueUnavailable):  # `listens` asks
                    await self._connection.publish(message.reply, b"")

            self._connection.listen(subject, take)
        return self._inboxes[subject]
