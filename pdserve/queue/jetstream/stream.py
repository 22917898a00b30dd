"""What a model's queue has on the NATS server: names, the stream and its consumer (made if they are missing, and safe
to make again), and the server's clock.

The age of a queued request is measured by that clock: the server's stamp on a message is compared with the server's own
time, never with this host's.
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
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from pdserve.contract.messages import QueueState
from pdserve.queue.jetstream.client import available, require_cluster, short_connection
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

API_TIMEOUT = 2.0
REPLICAS = 3
"""servers that keep the stream where there are so many: one of them may be lost"""
TOO_MANY = 10077
"""error code of a stream that has as many messages or bytes as it may"""
_NO_SPACE = (10028, 10047)
"""error codes of a server that cannot reserve so many bytes of memory or disk"""
_NO_LEADER = (10008,)
"""error code of a cluster that is choosing its leader"""
_NOT_ENABLED = (None, 10039, 10076)
"""error codes of a server or account without JetStream; None: nothing answers on its subjects, which is also so while
a cluster chooses its leader"""
MESSAGE_TTL = (2, 11)
"""version of the server from which on it removes a message when its own time is over"""
SAMPLES = 3
MEASURE_EVERY = 30.0
"""seconds; the server's clock may be set, too"""
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_LONGEST = 120
"""stream names become folder names"""


# names


def token(text: str) -> str:
    """Return `text` as one token of a subject: each byte of other characters than letters, digits, `_` and `-` becomes
    `=` and two hex digits. A token that is too long ends in a digest instead."""
    plain = "".join(
        char if char in _PLAIN else "".join(f"={byte:02X}" for byte in char.encode()) for char in text
    )
    if len(plain) <= _LONGEST:
        return plain or "="
    return f"{plain[: _LONGEST - 34]}=={hashlib.sha256(text.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class QueueNames:
    namespace: str
    model: str
    fingerprint: str = ""
    """of what the workers have loaded; workers of different fingerprints share nothing"""

    @property
    def root(self) -> str:
        return ".".join(["pdserve", token(self.namespace), token(self.model), token(self.fingerprint)])

    @property
    def stream(self) -> str:
        return f"{self.streams}{token(self.fingerprint)}"

    @property
    def streams(self) -> str:
        """The prefix of the names of all streams of the model."""
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

    def warm_ups(self, instance: str) -> str:
        return f"{self.root}.warm-ups.{token(instance)}"


CONSUMER = "prefill"
"""the durable consumer of a stream, shared by all prefill workers"""


# the stream


@dataclass(frozen=True)
class StreamLimits:
    ack_wait: float = 15.0
    """seconds without ack or progress after which a request is delivered to another worker"""
    max_deliver: int = 5
    """after so many deliveries without an ack, a request is taken to kill its workers and dropped"""
    bound: int = 1000
    """requests in the stream, those being worked on included"""
    max_bytes: int = 256 << 20
    """of all requests together: they are in the server's memory, and each may have megabytes"""
    max_age: float = 600.0
    """seconds; above any useful deadline"""
    publish_timeout: float = 1.0
    abandoned: float = 3600.0
    """seconds after which an unused stream is removed, by the server's clock"""
    resync: float = 2.0
    """seconds without a report while the queue is not empty, after which the server is asked"""
    check: float = 10.0
    """seconds between two comparisons of the stream and its consumer with what they should be"""


async def require_jetstream(client: Client, url: str) -> None:
    """Raises ConfigError if NATS runs without JetStream: everything would seem to work until the first prefill."""
    try:
        await client.jetstream(timeout=API_TIMEOUT).account_info()
    except nats.js.errors.ServiceUnavailableError as error:
        choosing = error.err_code is None and client._server_info.get("jetstream")
        if error.err_code not in _NOT_ENABLED or choosing:
            raise
        remedy = (
            "start it with `nats-server --jetstream`, and with `max_payload: 8MB` in the file of its --config, or let "
            "pdserve start its own by leaving `nats` out"
        )
        raise ConfigError(
            [f"NATS at {url} runs without JetStream, which the prefill queue needs: {remedy}."]
        ) from error


async def check_once(url: str, tls: SSLContext | None, of_cluster: bool) -> None:
    """Raises QueueUnavailable where nothing answers, and ConfigError for a server that cannot serve this graph."""
    with available(url):
        async with short_connection(url, tls) as client:
            if of_cluster:
                require_cluster(client)
            await require_jetstream(client, client.url)


async def ensure(
    client: Client, names: QueueNames, limits: StreamLimits, replicas: int | None = None
) -> None:
    """Make the stream and its consumer if they are missing, and set back what an administrator changed. The stream is
    in the server's memory, because a full disk stops a stream in files for as long as the server runs
    (docs/decisions/0011-queue-in-memory.md); in that of so many servers of a cluster, else as an administrator has it.
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
        # sealing sets both; of two workers that mend the stream, one may write them into what the other made anew
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
        return  # the server could not reserve them
    if changed:
        logger.warning("the stream %s has another %s than pdserve's: mending it", stream, ", ".join(changed))
        try:
            # keep what an administrator has set beside them (replicas, placement)
            await _apply(js.update_stream, current, settings)
        except nats.js.errors.APIError as error:
            logger.warning("the stream %s is made anew: %s", stream, error.description)
            await js.delete_stream(stream)
            await _add(js, new, settings)


async def _add(js: JetStreamContext, new: StreamConfig, settings: dict[str, Any]) -> None:
    try:
        await _apply(js.add_stream, new, settings)
    except nats.js.errors.APIError as error:
        if new.num_replicas == 1 or error.err_code in _NO_LEADER:
            raise
        logger.warning(
            "%s is kept by one server, not by %d: %s", new.name, new.num_replicas, error.description
        )
        await _apply(js.add_stream, replace(new, num_replicas=1), settings)


async def _replicate(js: JetStreamContext, current: StreamConfig, replicas: int) -> StreamConfig:
    """Have it kept by so many servers, or by as many as before where the cluster has too few."""
    try:
        return (await js.update_stream(current, num_replicas=replicas)).config
    except nats.js.errors.APIError as error:
        logger.debug("%s is not kept by %d servers: %s", current.name, replicas, error.description)
        return current


async def _apply(
    call: Callable[..., Awaitable[object]], config: StreamConfig, settings: dict[str, Any]
) -> None:
    """A bound in bytes is reserved at once; a server that cannot do so has a lower bound of its own."""
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
        logger.warning(
            "the consumer of %s has another %s than pdserve's: mending it", stream, ", ".join(changed)
        )
        try:
            await js.add_consumer(stream, wanted)
        except nats.js.errors.APIError:
            await js.delete_consumer(stream, CONSUMER)
            await js.add_consumer(stream, wanted)


async def remove_abandoned(client: Client, names: QueueNames, limits: StreamLimits) -> None:
    """Remove the streams that the model's workers of other fingerprints have left behind: empty, without a prefill
    worker that pulls, and unused for long. A stream that is in use after all is made anew at its next use."""
    js = client.jetstream(timeout=API_TIMEOUT)
    try:
        for stream in await js.streams_info():
            name = stream.config.name or ""
            if name.startswith(names.streams) and name != names.stream and not stream.state.messages:
                await _remove_if_idle(client, name, limits.abandoned)
    except (nats.js.errors.APIError, TimeoutError) as error:
        logger.debug("abandoned streams of %s stay: %s", names.model, error)


async def _remove_if_idle(client: Client, stream: str, after: float) -> None:
    js = client.jetstream(timeout=API_TIMEOUT)
    reply = await _stream_info(client, stream)
    used = max(_seconds(reply.get("created")), _seconds(reply.get("state", {}).get("last_ts")))
    if "ts" not in reply or _seconds(reply["ts"]) - used < after:
        return
    if any(consumer.num_waiting for consumer in await js.consumers_info(stream)):
        return
    await js.delete_stream(stream)
    logger.info("removed the stream %s: no worker has used it for %g s", stream, after)


async def _stream_info(client: Client, stream: str) -> dict[str, Any]:
    """Return the server's answer with its own time as `ts`, which nats-py leaves out."""
    reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=API_TIMEOUT)
    info: dict[str, Any] = json.loads(reply.data)
    return info


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp and not stamp.startswith("0001") else 0.0


async def read_state(client: Client, names: QueueNames) -> tuple[datetime | None, int, QueueState]:
    """Return when the stream was made, its last stored sequence, and the consumer's state, read after it."""
    js = client.jetstream(timeout=API_TIMEOUT)
    stream = await js.stream_info(names.stream)
    info = await js.consumer_info(names.stream, CONSUMER)
    delivered = info.delivered.stream_seq if info.delivered else 0
    return stream.created, stream.state.last_seq, QueueState(delivered, info.num_pending or 0)


# the clock


@dataclass(frozen=True)
class ServerClock:
    ahead: float
    """seconds that the server's Unix time is ahead of this host's monotonic time"""
    measured: float
    """monotonic"""

    def age(self, stamp: float) -> float:
        """Seconds since the server stamped a message with these Unix seconds."""
        return max(0.0, time.monotonic() + self.ahead - stamp)


async def measure(client: Client, stream: str) -> ServerClock | None:
    """Ask for the server's time a few times, and trust the quickest answer. Return None if the server (before 2.10)
    does not report its time, or has no such stream. Raises nats-py's errors and TimeoutError."""
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
