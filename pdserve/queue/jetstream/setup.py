"""What a model's queue needs on the server, made where it is missing, again and again without harm."""

from dataclasses import dataclass
from datetime import datetime

import nats.js.errors
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from pdserve.errors import ConfigError
from pdserve.messages import QueueState
from pdserve.queue.jetstream.names import CONSUMER, Names

API_TIMEOUT = 2.0
_NAME_IN_USE = 10058
TOO_MANY = 10077
"""error code of a stream that has as many messages as it may"""
_NOT_ENABLED = (None, 10039, 10076)
"""error codes of a server or account without JetStream; None: nobody answers on its subjects at all"""


@dataclass(frozen=True)
class Limits:
    ack_wait: float = 15.0
    """seconds without a word after which a request is delivered to another worker"""
    max_deliver: int = 5
    """a request that was delivered so often kills its workers: the next one drops it"""
    bound: int = 1000
    """requests in the stream, also those that are being worked on"""
    max_age: float = 600.0
    """seconds; the longest deadline that makes sense"""
    publish_timeout: float = 1.0
    resync: float = 2.0
    """seconds without news while the queue is not empty, after which the server is asked"""


async def require_jetstream(client: Client, url: str) -> None:
    """Raises ConfigError where NATS runs without JetStream: everything would seem to work until the first
    prefill."""
    try:
        await client.jetstream(timeout=API_TIMEOUT).account_info()
    except nats.js.errors.ServiceUnavailableError as error:
        if error.err_code not in _NOT_ENABLED:
            raise
        remedy = "start it with `nats-server --jetstream`, or let pdserve start its own by leaving `nats` out"
        raise ConfigError(
            [f"NATS at {url} runs without JetStream, which the prefill queue needs: {remedy}."]
        ) from error


async def ensure(client: Client, names: Names, limits: Limits) -> None:
    """Stream and consumer are there, with these limits; in the server's memory, because a full disk stops a stream in
    files for as long as the server runs (docs/decisions/0011-queue-in-memory.md)."""
    js = client.jetstream(timeout=API_TIMEOUT)
    ours = {
        "subjects": [names.requests],
        "retention": RetentionPolicy.WORK_QUEUE,
        "discard": DiscardPolicy.NEW,
        "max_msgs": limits.bound,
        "max_age": limits.max_age,
        "duplicate_window": min(120.0, limits.max_age),
    }
    try:
        await js.add_stream(StreamConfig(name=names.stream, storage=StorageType.MEMORY), **ours)
    except nats.js.errors.BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        # it has other limits: ours now, but what an administrator set beside them (replicas, placement) stays
        await js.update_stream((await js.stream_info(names.stream)).config, **ours)
    consumer = ConsumerConfig(
        durable_name=CONSUMER,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=limits.ack_wait,
        max_deliver=-1,
        max_ack_pending=limits.bound,
    )
    await js.add_consumer(names.stream, consumer)


async def read_state(client: Client, names: Names) -> tuple[datetime | None, int, QueueState]:
    """When the stream was made, the last stored sequence, and then how far the consumer is."""
    js = client.jetstream(timeout=API_TIMEOUT)
    stream = await js.stream_info(names.stream)
    info = await js.consumer_info(names.stream, CONSUMER)
    delivered = info.delivered.stream_seq if info.delivered else 0
    return stream.created, stream.state.last_seq, QueueState(delivered, info.num_pending or 0)
