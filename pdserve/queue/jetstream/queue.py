"""The prefill queue on NATS: requests in a JetStream work-queue stream, everything else on core NATS subjects."""

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
    PrefillPrefixes,
    PrefillRequest,
    PrefillStarted,
    QueueState,
    ToPrefill,
    decode_prefill_answer,
    decode_prefill_prefixes,
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
from pdserve.queue.jetstream.consumer_pull import REPLY_TIMEOUT, ConsumerMissing, PullConsumer
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
from pdserve.queue.reports import MAX_WORKERS, StateReports
from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import Credentials
from pdserve.util.errors import ProtocolError, QueueUnavailable
from pdserve.util.lru import LruDict
from pdserve.util.net import split_servers
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)

_MAX_CANCELLED = 20_000
"""Maximum of remembered ids of cancelled requests."""


class JetStreamQueue(PrefillQueue):
    def __init__(
        self,
        nats: str,
        namespace: str,
        model: str,
        limits: StreamLimits | None = None,
        credentials: Credentials | None = None,
        outage_effect: str = "",
        replicas: int | None = None,
    ) -> None:
        self._names = QueueNames(namespace, model)
        self._limits = limits or StreamLimits()
        self._replicas = replicas or (REPLICAS if len(split_servers(nats)) >= REPLICAS else None)
        tls = credentials.client if credentials else None
        self._connection = NatsConnection(nats, tls, outage_effect, self._prepare)
        self._acks = Acks(self._connection)
        self._publisher = Publisher(self._connection, self._limits.publish_timeout, self._ensure)
        self._puller = PullConsumer(self._connection, self._names.stream, CONSUMER)
        self._depth = QueueDepth()
        self._held = HeldCounts(self._connection)
        self._loads: LruDict[tuple[PrefillLoad, float]] = LruDict(MAX_WORKERS)
        self._own_pulls: LruDict[int] = LruDict(MAX_WORKERS)
        """by prefill worker: `delivered_seq` after its last pull of a request of this process"""
        self._reports = StateReports()
        self._pulled = asyncio.Event()
        """set by a pull or `load_changed` that `_report_state` has not seen yet"""
        self._last_pull: tuple[QueueState, Puller | None] = QueueState(0, 0), None
        """the state after this process's last pull, and the puller. `_report_state` resets the state after its use: by
        the next report, the stream may be another one"""
        self._created: datetime | None = None
        """when the stream was created, by the server's clock"""
        self._checked_at = 0.0
        """monotonic time of the last check of the stream's configuration"""
        self._synced_at = 0.0
        """monotonic time of the last report or query of the depth"""
        self._cancelled: LruDict[None] = LruDict(_MAX_CANCELLED)
        self._notices: SubjectMessages | None = None
        self._inboxes: dict[str, SubjectMessages] = {}
        self._clock: ServerClock | None = None

    def bind(self, fingerprint: str) -> None:
        self._names = replace(self._names, fingerprint=fingerprint)
        self._puller = PullConsumer(self._connection, self._names.stream, CONSUMER)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._connection.listen(self._names.state, self._on_state)
        self._connection.listen(self._names.held, self._held.on_report)
        async with self._connection, TaskOwner() as tasks:
            tasks.forever(self._resync, "queue depth")
            tasks.forever(partial(self._held.report, self._names.held), "held requests")
            tasks.forever(self._report_state, "queue state")
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
        """Set up a new connection: the server may be another one, or have lost its data."""
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
        self._checked_at = time.monotonic()

    # depth

    async def _on_state(self, message: Msg) -> None:
        try:
            state = decode_queue_state(message.data)
        except ProtocolError as error:
            logger.warning("skipped a queue state: %s", error)
            return
        self._reports.reported(state, time.monotonic())
        if state.delivered_seq and self._own_pulls.get(state.worker) == state.delivered_seq:
            state = msgspec.structs.replace(state, worker="")  # `PrefillStarted` had the load more precisely
        self._learn(state)

    def _learn(self, state: QueueState) -> None:
        now = time.monotonic()
        if state.delivered_seq:  # else only the load is known
            self._depth, self._synced_at = self._depth.reported(state), now
        if state.worker:
            self._loads[state.worker] = state.load, now

    async def _sync(self, client: Client) -> None:
        asked = self._depth
        created, stored, state = await read_state(client, self._names)
        if (self._created is not None and created != self._created) or stored < asked.last:
            self._acks.lost()
            self._reports = StateReports()
        self._created = created
        self._depth = self._depth.synced(stored, state, asked)
        self._synced_at = time.monotonic()

    async def _resync(self) -> None:
        """Repeat acks and cancellations, and restore the stream's configuration. Ask the server for the depth while no
        prefill worker reports it: they do not report requests that the server dropped."""
        while True:
            await tick(self._limits.resync)
            if not self.connected:
                continue
            try:
                client = self._connection.client()
                await self._publisher.withdraw_unsure(client, self._names.notices)
                await self._acks.repeat(client)
                if not self._clock or time.monotonic() - self._clock.measured >= MEASURE_EVERY:
                    await self._measure_clock(client)
                if time.monotonic() - self._checked_at >= self._limits.check:
                    await cancellable(self._ensure(client))
                    await cancellable(self._sync(client))
                elif self.stored and time.monotonic() - self._synced_at >= self._limits.resync:
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
        return self._connection.decoded(self._inbox(self._names.answers(instance)), self._decode_answer)

    def _decode_answer(self, data: bytes) -> PrefillAnswer:
        answer: PrefillAnswer = decode_prefill_answer(data)
        if isinstance(answer, PrefillStarted) and answer.state is not None:
            self._own_pulls[answer.state.worker] = answer.state.delivered_seq
            self._learn(answer.state)
        return answer

    async def cancel(self, request_ids: list[str]) -> None:
        await self._connection.publish(self._names.notices, encode(PrefillCancel(request_ids)))

    async def address(self, worker: str, request: PrefillRequest) -> None:
        await self._connection.publish(self._names.addressed(worker), encode(request))

    def prefixes(self) -> AsyncIterator[PrefillPrefixes]:
        return self._connection.decoded(self._inbox(self._names.prefixes), decode_prefill_prefixes)

    async def listens(self, worker: str) -> bool:
        client = self._connection.client()
        try:
            await cancellable(client.request(self._names.addressed(worker), b"", timeout=REPLY_TIMEOUT))
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise TimeoutError(f"{worker} does not answer") from error
        except nats.errors.Error:
            return True
        return True

    # prefill side

    async def expect_addressed(self, instance: str) -> None:
        self._inbox(self._names.addressed(instance))
        with suppress(QueueUnavailable):
            await self._connection.flush_subscriptions()

    def addressed(self, instance: str) -> AsyncIterator[PrefillRequest]:
        return self._connection.decoded(self._inbox(self._names.addressed(instance)), decode_prefill_request)

    async def report_prefixes(self, changed: PrefillPrefixes) -> None:
        await self._connection.publish(self._names.prefixes, encode(changed))

    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        self._listen_to_notices()
        ends = time.monotonic() + wait
        while True:
            messages = await self._fetch(limit, ends - time.monotonic())
            try:
                accepted = [await self._accept(message) for message in messages]
                deliveries = [delivery for delivery in accepted if delivery]
                await self._after_pull(messages, deliveries, worker)
            except asyncio.CancelledError:
                with suppress(QueueUnavailable):
                    for message in messages:  # deliver them to another worker at once
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
            raise QueueUnavailable(f"cannot use the queue's stream: {error}") from error

    async def _after_pull(
        self, messages: list[Msg], deliveries: list[Delivery], worker: Puller | None
    ) -> None:
        """Put the new queue state into the deliveries, for `PrefillStarted`, and have it broadcast later if others need
        it. Broadcast it at once if a pulled request was dropped, or a decode worker ignores `PrefillStarted.state`."""
        seen = [message.metadata for message in messages]
        newest = max(seen, key=lambda metadata: metadata.sequence.stream, default=None)
        if newest is None:
            return
        state = QueueState(newest.sequence.stream, newest.num_pending)
        if worker is not None:
            load = worker.load_with(delivery.request for delivery in deliveries)
            state = msgspec.structs.replace(state, worker=worker.id, load=load)
        self._learn(state)
        self._last_pull = state, worker
        self._pulled.set()
        for delivery in deliveries:
            delivery.state = state
            self._reports.pulled(delivery.request.decode, self._synced_at)
        if len(deliveries) < len(messages) or not all(each.request.reads_state for each in deliveries):
            await self._connection.publish(self._names.state, encode(state))

    def load_changed(self, worker: Puller) -> None:
        state, _ = self._last_pull
        self._last_pull = msgspec.structs.replace(state, worker=worker.id), worker
        self._pulled.set()

    async def _report_state(self) -> None:
        """Broadcast queue state and load after pulls, if decode workers need them (`queue/reports.py`), for ever."""
        while True:
            await self._pulled.wait()
            self._pulled.clear()
            await asyncio.sleep(self._reports.interval(time.monotonic()))
            state, worker = self._last_pull
            self._last_pull = QueueState(0, 0), worker
            if worker is not None:
                state = msgspec.structs.replace(state, load=worker.load())
            if report := self._reports.next(state, time.monotonic()):
                with suppress(QueueUnavailable):
                    await self._connection.publish(self._names.state, encode(report))

    async def _accept(self, message: Msg) -> Delivery | None:
        """Return the delivery; None if the request is dropped."""
        try:
            request = decode_prefill_request(message.data)
        except ProtocolError as error:
            logger.error("dropped prefill request %d: %s", message.metadata.sequence.stream, error)
            await self._connection.publish(message.reply, b"+TERM")
            return None
        delivery = JetStreamDelivery(self._acks, self._clock, message, request)
        deliveries = message.metadata.num_delivered
        if deliveries > self._limits.max_deliver:
            logger.error(
                "request %s: dropped after %d deliveries without an ack", request.request_id, deliveries - 1
            )
        elif delivery.deadline <= time.monotonic():
            logger.info("request %s: dropped, its deadline has passed", request.request_id)
        elif request.request_id in self._cancelled:
            logger.debug("request %s: dropped, it was cancelled", request.request_id)
        else:
            return delivery
        await delivery.ack()
        return None

    async def answer(self, instance: str, answer: PrefillAnswer) -> None:
        await self._connection.publish(self._names.answers(instance), encode(answer))

    def notices(self) -> AsyncIterator[ToPrefill]:
        return self._connection.decoded(self._listen_to_notices(), decode_to_prefill)

    def _listen_to_notices(self) -> SubjectMessages:
        """Subscribe once, for `notices` and to drop cancelled requests."""
        if self._notices is None:
            inbox = self._notices = SubjectMessages(self._names.notices)

            async def on_notice(message: Msg) -> None:
                with suppress(ProtocolError):
                    notice = decode_to_prefill(message.data)
                    if isinstance(notice, PrefillCancel):
                        self._cancelled.update(dict.fromkeys(notice.request_ids))
                await inbox.put(message)

            self._connection.listen(self._names.notices, on_notice)
        return self._notices

    # listening

    def _inbox(self, subject: str) -> SubjectMessages:
        """Return the inbox of a subject. A reader that restarts gets the same inbox, with its unread messages."""
        if subject not in self._inboxes:
            inbox = self._inboxes[subject] = SubjectMessages(subject)

            async def on_message(message: Msg) -> None:
                if message.data:
                    await inbox.put(message)
                    return
                with suppress(QueueUnavailable):  # an empty message is `listens`'s question
                    await self._connection.publish(message.reply, b"")

            self._connection.listen(subject, on_message)
        return self._inboxes[subject]
