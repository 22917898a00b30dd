"""The NATS server's clock, by which all ages of queued requests are told: the stamp that the server puts on a message
is compared with the server's own time, never with this host's."""

import json
import secrets
import time
from dataclasses import dataclass
from datetime import datetime

import nats.errors
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from pdserve import clock
from pdserve.errors import QueueUnavailable
from pdserve.queue.jetstream.connection import discard, open_client

SAMPLES = 3
MEASURE_EVERY = 30.0
"""seconds; clocks of servers are set, too"""
_TIMEOUT = 2.0


@dataclass(frozen=True)
class ServerClock:
    ahead: float
    """seconds that the server's Unix time is ahead of this host's monotonic time"""
    skew: float
    """seconds that this process's time of day is ahead of the server's"""
    measured: float
    """monotonic"""

    def age(self, stamp: float) -> float:
        """Seconds since the server stamped a message with these Unix seconds."""
        return max(0.0, time.monotonic() + self.ahead - stamp)


async def measure(client: Client, stream: str) -> ServerClock | None:
    """The quickest of a few questions tells the most. None where the server (before 2.10) does not tell its time, or
    there is no such stream. Raises nats' errors and TimeoutError."""
    best: tuple[float, ServerClock] | None = None
    for _ in range(SAMPLES):
        sent = time.monotonic()
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_TIMEOUT)
        now = time.monotonic()
        stamp = json.loads(reply.data).get("ts")
        if stamp is None:
            return None
        server, trip = datetime.fromisoformat(stamp).timestamp(), now - sent
        if best is None or trip < best[0]:
            middle = sent + trip / 2
            here = clock.unix() - (time.monotonic() - middle)
            best = trip, ServerClock(server - middle, here - server, now)
    return best[1] if best else None


async def clock_skew(url: str) -> float | None:
    """Of this process against the server, with a stream that is there for a moment only. Raises QueueUnavailable."""
    client, stream = Client(), f"pdserve-clock-{secrets.token_hex(4)}"
    try:
        await open_client(client, url)
        js = client.jetstream(timeout=_TIMEOUT)
        await js.add_stream(StreamConfig(name=stream, subjects=[stream], storage=StorageType.MEMORY))
        try:
            found = await measure(client, stream)
        finally:
            await js.delete_stream(stream)
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise QueueUnavailable(f"NATS at {url}: {error}") from error
    finally:
        await discard(client)
    return found.skew if found else None
