"""What each process tells of itself to whatever watches the graph (the dashboard, `pdserve status`, `pdserve trace`),
over HTTP on its own pages. The rules of `messages.py` hold for these records, too: no times, only ages and durations.
None of them has text of a request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from pdserve.messages import Hop, Load

HOPS = {
    "admission": "the frontend holds the request until it is its client's turn and a worker has room",
    "queue": "in the prefill queue: published by the decode worker, to be pulled by a prefill worker",
    "turn": "the decode worker holds the prompt while its engine computes those before it",
    "prefill": "the prompt is computed: at a prefill worker from its pulling to its KV, at a decode worker from its "
    "entering the engine to the first token",
    "transfer": "the decode engine waits for the KV that it reads from the prefill engine",
    "first-step": "from the KV in its place to the end of the decode engine's first step for the request",
    "decode": "from the first token to the last",
    "fallback": "remote prefill came to nothing, and the decode worker computes the prompt; takes no time itself",
    "migration": "a decode worker lost the request, which goes on at another one; takes no time itself",
}
"""The parts of a request's way: in receipts, in the `server-timing` header, and as spans of a trace."""

DETOURS = ("fallback", "migration")
"""those that take no time: for them the request did not go the way that was meant for it"""

BUCKETS = (
    *(0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6),
    *(1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 120.0, 300.0),
)
"""seconds: upper bounds of the histograms of latencies"""

TICK = 2.0
"""seconds that a `Tick` is about"""
MAX_TICKS = 150
"""that a frontend keeps: 5 minutes"""
MOST_KEPT, KEPT_FOR = 1000, 900.0
"""receipts of requests that are over that a frontend keeps, and the seconds for which it does"""
MAX_TOLD = 100
"""receipts, the newest, that a frontend tells at once: more would hold up its streams"""
MAX_ASTRAY = 30
"""of requests that went astray and are older than those, the newest, that it tells as well"""
LOOK = 1.0
"""seconds between two looks at the connections to NATS and etcd"""


class Receipt(Struct, frozen=True):
    """Where one HTTP request went, why, and what took how long; of a running one, so far."""

    request_id: str
    frontend: str
    """instance id"""
    path: str
    age: float
    """seconds since it came, when this was told"""
    seconds: float = 0.0
    """from its coming to its end, or until now"""
    running: bool = False
    model: str = ""
    key: str = ""
    """name of the API key that it came with"""
    status: int = 0
    """of the HTTP answer; 0: none has begun; 499: the client left before one"""
    error: str = ""
    prefill: str = ""
    """`local`, `remote`, or `local,remote` where parts of it (n > 1, several prompts) differed"""
    reason: str = ""
    """why so: the decode worker's word (docs/metrics.md)"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """of the prompt, that were in a prefix cache"""
    output_tokens: int = 0
    ttft: float | None = None
    """seconds"""
    retries: int = 0
    """how often it went on at another decode worker"""
    instances: list[str] = []
    """decode workers that worked on it, in order"""
    hops: list[Hop] = []
    """in the order of their starts, which are seconds from its coming; of several sequences (n > 1), of the first"""
    trace_id: str = ""
    """of its trace, where it is traced"""

    @property
    def astray(self) -> bool:
        """It did not go the way that was meant for it."""
        return any(hop.name in DETOURS for hop in self.hops)


def newest(limit: int, *told: Sequence[Receipt]) -> list[Receipt]:
    """Of several processes, the newest first."""
    return sorted((receipt for some in told for receipt in some), key=lambda receipt: receipt.age)[:limit]


class LinkState(Struct, frozen=True):
    """A connection of the process that tells it to another one: of a frontend to a decode worker (`requests`), or of a
    decode worker to a prefill worker that it reads KV from (`kv`)."""

    to: str
    """instance id"""
    kind: str
    up: bool = True
    """false: it cannot be reached, or is avoided"""
    requests: int = 0
    """of this process that are at the other end now"""
    round_trip: float | None = None
    """seconds, the last that was measured"""
    pulls: int = 0
    """kv: requests whose KV was read over it, since it is there"""
    pull_seconds: float | None = None
    """kv: of one request, a mean in which the newest counts most"""
    bytes_per_second: float | None = None
    """kv: the same of what moved in that time"""
    failures: int = 0
    """since it is there"""
    failure: str = ""
    """why, the last time"""


class Tick(Struct, frozen=True):
    """What a frontend served in one `TICK`."""

    requests: int = 0
    """that ended"""
    failed: int = 0
    """of them, with a status of 500 or more, or an error of such a status in their stream"""
    refused: int = 0
    """of them, with 429"""
    tokens: int = 0
    """that were sent"""
    ttft: list[int] = []
    """how many fell into each bucket of `BUCKETS`, and beyond the last; empty: none"""
    itl: list[int] = []


class Outage(Struct, frozen=True):
    """NATS or etcd does not answer the process."""

    server: str
    """`NATS` or `etcd`"""
    address: str
    """without a user's name and password"""
    seconds: float
    """since the connection was lost"""


class Watched(Struct, frozen=True):
    """A process at one moment."""

    load: Load = Load()
    links: list[LinkState] = []
    ticks: list[Tick] = []
    """of a frontend: the newest last, which has just ended"""
    receipts: list[Receipt] = []
    """of a frontend: the newest first, `MAX_TOLD` and `MAX_ASTRAY`"""
    outages: list[Outage] = []


class Connections:
    """How long a process has been without its connections to NATS and etcd."""

    def __init__(self) -> None:
        self._servers: list[tuple[str, str, Callable[[], bool]]] = []
        self._lost: dict[str, float] = {}
        """by server: monotonic time of the first look that found it lost"""

    def add(self, server: str, url: str, connected: Callable[[], bool]) -> None:
        self._servers.append((server, url.rpartition("://")[2].rpartition("@")[2], connected))

    def outages(self) -> list[Outage]:
        now = time.monotonic()
        for server, _, connected in self._servers:
            if connected():
                self._lost.pop(server, None)
            else:
                self._lost.setdefault(server, now)
        return [
            Outage(server, address, now - self._lost[server])
            for server, address, _ in self._servers
            if server in self._lost
        ]

    async def follow(self) -> None:
        """Look for ever, so that an outage is timed although nothing asks for it."""
        while True:
            self.outages()
            await asyncio.sleep(LOOK)
