"""What each process reports about itself, over HTTP on its own pages, to what watches the graph: the dashboard,
`pdserve status`, `pdserve trace`. As in `messages.py`, records carry ages and durations, never times of day. None of
them contains text of a request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from pdserve.contract.messages import Hop, Load
from pdserve.util.net import split_servers, strip_passwords

DETOURS = ("fallback", "migration")
"""hops without a duration, which say that something failed and the request took another way"""
HOPS = (
    *("admission", "queue", "turn", "engine-queue", "prefill", "transfer", "first-step", "decode"),
    *DETOURS,
)
"""the parts of a request's life, as `pdserve trace --help` and docs/traces.md explain them: in receipts, in the
`server-timing` header, and as spans of a trace"""

MIN_HOP_SECONDS = 0.1
"""seconds of a wait in an engine that are no hop of their own: mostly the rest of the step that runs"""

BUCKETS = (
    *(0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6),
    *(1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 120.0, 300.0),
)
"""upper bounds of the latency histograms, in seconds"""

TICK = 2.0
"""seconds that a `Tick` covers"""
MAX_TICKS = 150
"""ticks that a frontend keeps: 5 minutes"""
MAX_RECEIPTS, RECEIPT_LIFETIME = 1000, 900.0
"""how many receipts of finished requests a frontend keeps, and for how many seconds"""
MAX_REPORTED_RECEIPTS = 100
"""the newest receipts that a frontend reports at once: encoding more would delay its streams"""
MAX_DETOURS = 30
"""older receipts with a detour, the newest, that it reports in addition"""
LOST_WORKER_LIFETIME = 600.0
"""seconds for which a worker that vanished is reported"""
POLL_INTERVAL = 1.0
"""seconds between two looks at the connections to NATS and etcd"""


class Receipt(Struct, frozen=True):
    """Where one HTTP request went, why, and what took how long. Of a running request: until now."""

    request_id: str
    frontend: str
    """instance id"""
    path: str
    age: float
    """seconds since the request arrived"""
    seconds: float = 0.0
    """from its arrival to its end, or until now"""
    running: bool = False
    model: str = ""
    key: str = ""
    """name of the request's API key"""
    status: int = 0
    """of the HTTP answer, or of the error that ended its stream; 0: not begun; 499: the client left before it began"""
    error: str = ""
    prefill: str = ""
    """`local`, `remote`, or `local,remote` where parts of it (n > 1, several prompts) differed"""
    reason: str = ""
    """the decode worker's reason for that (docs/metrics.md)"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """prompt tokens that were in a prefix cache"""
    output_tokens: int = 0
    ttft: float | None = None
    """seconds"""
    retries: int = 0
    """migrations to another decode worker"""
    instances: list[str] = []
    """decode workers that had it, in order"""
    hops: list[Hop] = []
    """in the order of their starts, which are seconds from its arrival; with several sequences (n > 1), of the first"""
    trace_id: str = ""
    """empty where it is not traced"""
    promise: str = ""
    """what became of its promise: `kept`, or the first that was broken: `ttft`, `gap`, `failed`; empty: there is none,
    or it is not known yet"""
    broken_by: str = ""
    """the hop that took most of the time for which `ttft` or `gap` was broken"""
    longest_gap: float = 0.0
    """seconds between two tokens; 0 without a promise"""

    @property
    def prefill_summary(self) -> str:
        """How its prompt got its KV and why, for people: `local: cheaper` for the reason `local-cheaper`."""
        return ": ".join(filter(None, (self.prefill, self.reason.removeprefix(f"{self.prefill}-"))))

    @property
    def has_detour(self) -> bool:
        """It has a detour: a fallback or a migration."""
        return any(hop.name in DETOURS for hop in self.hops)


def newest_receipts(limit: int, *reported: Sequence[Receipt]) -> list[Receipt]:
    """Merge the receipts of several processes, the newest first."""
    return sorted((receipt for some in reported for receipt in some), key=lambda receipt: receipt.age)[:limit]


class LinkState(Struct, frozen=True):
    """A connection of the reporting process: a frontend's to a decode worker (kind `requests`), or a decode worker's to
    a prefill worker that it reads KV from (`kv`)."""

    to: str
    """instance id"""
    kind: str
    up: bool = True
    """false: the other end cannot be reached, or is avoided"""
    requests: int = 0
    """requests of this process that are at the other end now"""
    round_trip: float | None = None
    """seconds, as last measured"""
    pulls: int = 0
    """kv: requests whose KV was read over it"""
    pull_seconds: float | None = None
    """kv: for one request, a moving average"""
    bytes_per_second: float | None = None
    """kv: moving average"""
    failures: int = 0
    failure: str = ""
    """reason of the last one"""
    idle: float = 0.0
    """kv: seconds since a request's KV was read over it"""


class Tick(Struct, frozen=True):
    """What a frontend served in one `TICK`."""

    requests: int = 0
    """ended ones"""
    failed: int = 0
    """ended with a status of 500 or more, or with such an error in the stream"""
    refused: int = 0
    """ended with 429"""
    tokens: int = 0
    """sent to clients"""
    ttft: list[int] = []
    """observations in each bucket of `BUCKETS`, and beyond the last; empty: none at all"""
    itl: list[int] = []
    promised: int = 0
    """ended with a promise to keep"""
    kept: int = 0
    """of these, those that kept it"""


class Outage(Struct, frozen=True):
    """NATS or etcd does not answer the reporting process."""

    server: str
    """`NATS` or `etcd`"""
    address: str
    """without a user's name and password"""
    seconds: float
    """since the connection was lost"""
    why: str = ""
    """how the server ended, or what it answers instead; empty: not known"""


class LostWorker(Struct, frozen=True):
    """A worker whose lease ended without a drain, while no other has replaced it."""

    id: str
    host: str
    seconds: float
    """since then"""
    model: str = ""


class ProcessReport(Struct, frozen=True):
    """A process at one moment."""

    load: Load = Load()
    links: list[LinkState] = []
    ticks: list[Tick] = []
    """of a frontend: the newest last"""
    receipts: list[Receipt] = []
    """of a frontend: the newest first, `MAX_REPORTED_RECEIPTS` and `MAX_DETOURS`"""
    outages: list[Outage] = []
    gone: list[LostWorker] = []
    """of a frontend"""


class OutageTracker:
    """How long a process has been without its connections to NATS and etcd."""

    def __init__(self) -> None:
        self._servers: list[tuple[str, str, Callable[[], bool]]] = []
        self._lost: dict[str, float] = {}
        """by server: monotonic time of the first look that found it lost"""

    def add(self, server: str, url: str, connected: Callable[[], bool]) -> None:
        hosts = [each.rpartition("://")[2] for each in split_servers(strip_passwords(url))]
        self._servers.append((server, ",".join(hosts), connected))

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
            await asyncio.sleep(POLL_INTERVAL)
