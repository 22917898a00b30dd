"""The queue's NATS subjects, its JetStream stream and consumer (created and repaired here), and the server's clock.

A queued request's age is the server's time minus the server's timestamp of the message, because the clocks of hosts
differ.
"""

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from ssl import SSLContext
from typing import Any

import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from pdserve.contract.messages import QueueState
from pdserve.queue.jetstream.client import available, require_cluster, short_connection
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

API_TIMEOUT = 2.0
REPLICAS = 3
"""Replicas of the stream in a cluster of at least this many servers; the stream survives the loss of one."""
STREAM_FULL = 10077
"""Error code of a stream that has reached its limit of messages or bytes."""
_NO_SPACE = (10028, 10047)
"""Error codes of a server that cannot reserve `max_bytes`."""
_NO_LEADER = (10008,)
"""Error code of a cluster that is electing a leader."""
_NOT_ENABLED = (None, 10039, 10076)
"""Error codes of a server or account without JetStream. None: nothing responds, also during a leader election."""
MESSAGE_TTL = (2, 11)
"""First server version with a TTL for each message."""
SAMPLES = 3
MEASURE_EVERY = 30.0
"""Seconds between two measurements of the server's clock, which may be set at any time."""
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_MAX_TOKEN = 120
"""Maximum of characters in a token: stream names become folder names."""


# names


def token(text: str) -> str:
    """Encode `text` as a token of a subject: letters, digits, `_` and `-` stay, and each byte of other characters
    becomes `=` and two hex digits. A token that is too long ends in a digest."""
    plain = "".join(
        char if char in _PLAIN else "".join(f"={byte:02X}" for byte in char.encode()) for char in text
    )
    if len(plain) <= _MAX_TOKEN:
        return plain or "="
    return f"{plain[: _MAX_TOKEN - 34]}=={hashlib.sha256(text.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class QueueNames:
    namespace: str
    model: str
    fingerprint: str = ""
    """of the workers' model; workers of different fingerprints share no subject"""

    @property
    def root(self) -> str:
        return ".".join(["pdserve", token(self.namespace), token(self.model), token(self.fingerprint)])

    @property
    def stream(self) -> str:
        return f"{self.streams}{token(self.fingerprint)}"

    @property
    def streams(self) -> str:
        """Name prefix of all streams of the model."""
        return f"pdserve+{token(self.namespace)}+{token(self.model)}+"

    @property
    def requests(self) -> str:
        return f"{self.root}.prefill"

    @property
    def state(self) -> str:
        return f"{self.root}.state"

    @property
    def held(self) -> str:
        return f"{self.root}.held"

    @property
    def notices(self) -> str:
        return f"{self.root}.notices"

    def answers(self, instance: str) -> str:
        return f"{self.root}.answers.{token(instance)}"

    @property
    def prefixes(self) -> str:
        return f"{self.root}.prefixes"

    def addressed(self, instance: str) -> str:
        """Subject of requests to one worker. Named for warm-ups: older versions send no other requests this way."""
        return f"{self.root}.warm-ups.{token(instance)}"


CONSUMER = "prefill"
"""Name of the durable consumer that all prefill workers share."""


# the stream


@dataclass(frozen=True)
class StreamLimits:
    ack_wait: float = 15.0
    """seconds without ack or progress after which a request is delivered to another worker"""
    max_deliver: int = 5
    """deliveries without an ack after which a request is dropped, because it seems to kill its workers"""
    bound: int = 1000
    """maximum of requests in the stream, including those being computed"""
    max_bytes: int = 256 << 20
    """maximum of bytes of all requests, which are in the server's memory"""
    max_age: float = 600.0
    """seconds; longer than any useful deadline"""
    publish_timeout: float = 1.0
    abandoned: float = 3600.0
    """seconds without use after which another fingerprint's stream is removed"""
    resync: float = 2.0
    """seconds without a report after which the server is asked for the depth, if the last known depth is above 0"""
    check: float = 10.0
    """seconds between two checks of the configuration of stream and consumer"""


async def require_jetstream(client: Client, url: str) -> None:
    """Raise ConfigError if NATS runs without JetStream, before the first remote prefill fails."""
    try:
        await client.jetstream(timeout=API_TIMEOUT).account_info()
    except nats.js.errors.ServiceUnavailableError as error:
        is_electing = error.err_code is None and client._server_info.get("jetstream")
        if error.err_code not in _NOT_ENABLED or is_electing:
            raise
        remedy = (
            "start it with `nats-server --jetstream`, and with `max_payload: 8MB` in the file of its --config, or let "
            "pdserve start its own by leaving `nats` out"
        )
        raise ConfigError(
            [f"NATS at {url} runs without JetStream, which the prefill queue needs: {remedy}."]
        ) from error


async def check_once(url: str, tls: SSLContext | None, of_cluster: bool) -> None:
    """Raise QueueUnavailable if NATS does not answer, and ConfigError if it cannot serve this graph."""
    with available(url):
        async with short_connection(url, tls) as client:
            if of_cluster:
                require_cluster(client)
            await require_jetstream(client, client.url)


async def ensure(
    client: Client, names: QueueNames, limits: StreamLimits, replicas: int | None = None
) -> None:
    """Create the stream and its consumer if they are missing, and restore settings that an administrator changed. The
    stream is in the server's memory, because a full disk stops a file-based stream until the server restarts
    (docs/decisions/0011-queue-in-memory.md). `replicas` None keeps an administrator's number of replicas.
    """
    js = client.jetstream(timeout=API_TIMEOUT)
    await _ensure_stream(js, names.stream, _stream_settings(client, names, limits), replicas)
    await _ensure_consumer(
        js,
        names.stream,
        ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=limits.ack_wait,
            max_deliver=-1,
            max_ack_pending=limits.bound,
        ),
    )


def _stream_settings(client: Client, names: QueueNames, limits: StreamLimits) -> dict[str, Any]:
    settings = {
        "subjects": [names.requests],
        "retention": RetentionPolicy.WORK_QUEUE,
        "discard": DiscardPolicy.NEW,
        "max_msgs": limits.bound,
        "max_bytes": limits.max_bytes,
        "max_msg_size": -1,
        "max_msgs_per_subject": -1,
        "max_age": limits.max_age,
        "duplicate_window": min(120.0, limits.max_age),
        "no_ack": False,
        "sealed": False,
        # a sealed stream has both set; a worker that read a sealed stream's settings may write them into the next one
        "deny_delete": False,
        "deny_purge": False,
    }
    version = client.connected_server_version
    return settings | ({"allow_msg_ttl": True} if (version.major, version.minor) >= MESSAGE_TTL else {})


async def _ensure_stream(
    js: JetStreamContext, stream: str, settings: dict[str, Any], replicas: int | None
) -> None:
    new = StreamConfig(name=stream, storage=StorageType.MEMORY, num_replicas=replicas or 1)
    try:
        current = (await js.stream_info(stream)).config
    except nats.js.errors.NotFoundError:
        await _add(js, new, settings)
        return
    if replicas and current.num_replicas != replicas:
        current = await _replicate(js, current, replicas)
    changed = [
        name for name, value in settings.items() if (getattr(current, name) or None) != (value or None)
    ]
    if changed == ["max_bytes"] and current.max_bytes == -1:
        return  # the server could not reserve max_bytes
    if changed:
        logger.warning("nats: stream %s was changed (%s); restoring it", stream, ", ".join(changed))
        try:
            # an administrator's other settings (replicas, placement) stay
            await _apply(js.update_stream, current, settings)
        except nats.js.errors.APIError as error:
            logger.warning("nats: cannot restore stream %s: %s; recreating it", stream, error.description)
            await js.delete_stream(stream)
            await _add(js, new, settings)


async def _add(js: JetStreamContext, new: StreamConfig, settings: dict[str, Any]) -> None:
    try:
        await _apply(js.add_stream, new, settings)
    except nats.js.errors.APIError as error:
        if new.num_replicas == 1 or error.err_code in _NO_LEADER:
            raise
        logger.warning(
            "nats: cannot create %d replicas of stream %s: %s; using one",
            new.num_replicas,
            new.name,
            error.description,
        )
        await _apply(js.add_stream, replace(new, num_replicas=1), settings)


async def _replicate(js: JetStreamContext, current: StreamConfig, replicas: int) -> StreamConfig:
    """Set the number of replicas; keep the present number if the cluster has too few servers."""
    try:
        return (await js.update_stream(current, num_replicas=replicas)).config
    except nats.js.errors.APIError as error:
        logger.debug("nats: cannot set %d replicas of %s: %s", replicas, current.name, error.description)
        return current


async def _apply(
    call: Callable[..., Awaitable[object]], config: StreamConfig, settings: dict[str, Any]
) -> None:
    """Create or update a stream, without max_bytes if the server cannot reserve so many."""
    try:
        await call(config, **settings)
    except nats.js.errors.Error as error:
        if getattr(error, "err_code", None) not in _NO_SPACE:
            raise
        await call(config, **{name: value for name, value in settings.items() if name != "max_bytes"})


async def _ensure_consumer(js: JetStreamContext, stream: str, wanted: ConsumerConfig) -> None:
    try:
        current = (await js.consumer_info(stream, CONSUMER)).config
    except nats.js.errors.NotFoundError:
        await js.add_consumer(stream, wanted)
        return
    settings = (
        "ack_policy",
        "ack_wait",
        "max_deliver",
        "max_ack_pending",
        "filter_subject",
        "deliver_subject",
    )
    if changed := [name for name in settings if getattr(current, name) != getattr(wanted, name)]:
        logger.warning("nats: consumer of %s was changed (%s); restoring it", stream, ", ".join(changed))
        try:
            await js.add_consumer(stream, wanted)
        except nats.js.errors.APIError:
            await js.delete_consumer(stream, CONSUMER)
            await js.add_consumer(stream, wanted)


async def remove_abandoned(client: Client, names: QueueNames, limits: StreamLimits) -> None:
    """Remove the streams of this model's other fingerprints that are empty, are not pulled from, and have been unused
    for long. If such a stream is used again, it is recreated."""
    js = client.jetstream(timeout=API_TIMEOUT)
    try:
        for stream in await js.streams_info():
            name = stream.config.name or ""
            if name.startswith(names.streams) and name != names.stream and not stream.state.messages:
                await _remove_if_idle(client, name, limits.abandoned)
    except (nats.js.errors.APIError, TimeoutError) as error:
        logger.debug("nats: cannot remove abandoned streams of %s: %s", names.model, error)


async def _remove_if_idle(client: Client, stream: str, after: float) -> None:
    js = client.jetstream(timeout=API_TIMEOUT)
    reply = await _stream_info(client, stream)
    used = max(_seconds(reply.get("created")), _seconds(reply.get("state", {}).get("last_ts")))
    if "ts" not in reply or _seconds(reply["ts"]) - used < after:
        return
    if any(consumer.num_waiting for consumer in await js.consumers_info(stream)):
        return
    await js.delete_stream(stream)
    logger.info("nats: removed stream %s: unused for %g s", stream, after)


async def _stream_info(client: Client, stream: str) -> dict[str, Any]:
    """Return the stream's info with the server's time as `ts`, which nats-py leaves out."""
    reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=API_TIMEOUT)
    info: dict[str, Any] = json.loads(reply.data)
    return info


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp and not stamp.startswith("0001") else 0.0


async def read_state(client: Client, names: QueueNames) -> tuple[datetime | None, int, QueueState]:
    """Return the stream's creation time, its last sequence, and the consumer's state, which is read after both."""
    js = client.jetstream(timeout=API_TIMEOUT)
    stream = await js.stream_info(names.stream)
    info = await js.consumer_info(names.stream, CONSUMER)
    delivered = info.delivered.stream_seq if info.delivered else 0
    return stream.created, stream.state.last_seq, QueueState(delivered, info.num_pending or 0)


# the clock


@dataclass(frozen=True)
class ServerClock:
    ahead: float
    """the server's Unix time minus this host's monotonic time"""
    measured: float
    """monotonic time of the measurement"""

    def age(self, stamp: float) -> float:
        """Return the seconds since the server's timestamp of a message."""
        return max(0.0, time.monotonic() + self.ahead - stamp)


async def measure(client: Client, stream: str) -> ServerClock | None:
    """Query the server's time a few times and use the fastest reply. Return None if the server (before 2.10) does not
    report its time, or has no such stream. Raises nats-py's errors and TimeoutError."""
    best: tuple[float, ServerClock] | None = None
    for _ in range(SAMPLES):
        sent = time.monotonic()
        stamp = (await _stream_info(client, stream)).get("ts")
        now = time.monotonic()
        if stamp is None:
            return None
        server, trip = datetime.fromisoformat(stamp).timestamp(), now - sent
        if best is None or trip < best[0]:
            best = trip, ServerClock(server - (sent + trip / 2), now)
    return best[1] if best else None
