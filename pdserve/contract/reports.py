"""What each process reports about itself over HTTP (`/watch`), for the dashboard, `pdserve status` and `pdserve trace`.

As in `messages.py`, records carry ages and durations, never times of day. No record contains the text of a request.
"""

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from pdserve.contract.messages import Hop, Load
from pdserve.util.net import split_servers, strip_passwords
from pdserve.util.ticks import tick

DETOURS = ("fallback", "migration")
"""Hops without a duration: something failed, and the request continued in another way."""
HOPS = (
    *("admission", "queue", "turn", "engine-queue", "prefill", "transfer", "first-step", "decode"),
    *DETOURS,
)
"""Stages of a request in receipts, in the `server-timing` header and in traces. docs/traces.md explains them."""

MIN_HOP_SECONDS = 0.1
"""Shortest wait in an engine that is reported as a hop. Shorter waits are mostly the rest of the running step."""

BUCKETS = (
    *(0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6),
    *(1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 120.0, 300.0),
)
"""Upper bounds of the latency histograms in seconds."""

TICK = 2.0
"""Seconds that a `Tick` covers."""
MAX_TICKS = 150
"""Ticks that a frontend keeps: 5 minutes."""
MAX_RECEIPTS = 1000
"""Maximum of receipts of finished requests in a frontend."""
RECEIPT_LIFETIME = 900.0
"""Seconds for which a frontend keeps a receipt."""
MAX_REPORTED_RECEIPTS = 100
"""Number of newest receipts in a report. Encoding more would delay tokens."""
MAX_DETOURS = 30
"""Maximum of older receipts that a report adds because they have a hop of `DETOURS`."""
LOST_LIFETIME = 600.0
"""Seconds for which a lost process is reported."""
POLL_INTERVAL = 1.0
"""Seconds between two checks of the connections to NATS and etcd."""


class Receipt(Struct, frozen=True):
    """The path of an HTTP request through the graph, with reasons and durations. Of a running request: until now."""

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
    """HTTP status of the response, or of the error that ended its stream; 0: no response yet; 499: the client
    disconnected before the response began"""
    error: str = ""
    prefill: str = ""
    """`local`, `remote`, or `local,remote` if its sequences (n > 1, several prompts) differed"""
    reason: str = ""
    """the decode worker's reason for `prefill` (docs/metrics.md)"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """prompt tokens that were a prefix hit"""
    output_tokens: int = 0
    ttft: float | None = None
    """seconds"""
    retries: int = 0
    """migrations to another decode worker"""
    instances: list[str] = []
    """ids of its decode workers, in order"""
    hops: list[Hop] = []
    """of the first sequence, ordered by start; a start is in seconds from the request's arrival"""
    trace_id: str = ""
    """empty: not traced"""
    promise: str = ""
    """`kept`, or how the SLO was missed: `ttft`, `gap` or `failed`; empty: no SLO, not known yet, an invalid request,
    or the client left before"""
    broken_by: str = ""
    """the longest hop in the missed `ttft` or `gap`"""
    longest_gap: float = 0.0
    """seconds between two tokens; 0 without an SLO"""

    @property
    def prefill_summary(self) -> str:
        """Its prefill and the reason, for people: `local: cheaper` for the reason `local-cheaper`."""
        return ": ".join(filter(None, (self.prefill, self.reason.removeprefix(f"{self.prefill}-"))))

    @property
    def has_detour(self) -> bool:
        return any(hop.name in DETOURS for hop in self.hops)


def newest_receipts(limit: int, *reported: Sequence[Receipt]) -> list[Receipt]:
    """Merge the receipts of several processes, newest first."""
    return sorted((receipt for some in reported for receipt in some), key=lambda receipt: receipt.age)[:limit]


class LinkState(Struct, frozen=True):
    """A connection of the reporting process: of a frontend to a decode worker (kind `requests`), or of a decode worker
    to a prefill worker whose KV it reads (`kv`)."""

    to: str
    """instance id"""
    kind: str
    up: bool = True
    """false: the other end is unreachable or avoided"""
    requests: int = 0
    """requests of this process at the other end now"""
    round_trip: float | None = None
    """seconds, as last measured"""
    pulls: int = 0
    """kv: requests whose KV was read"""
    pull_seconds: float | None = None
    """kv: seconds per request, a moving average"""
    bytes_per_second: float | None = None
    """kv: moving average"""
    failures: int = 0
    failure: str = ""
    """reason of the last failure"""
    idle: float = 0.0
    """kv: seconds since the last KV read"""


class Tick(Struct, frozen=True):
    """What a frontend served in `TICK` seconds."""

    requests: int = 0
    """finished requests"""
    failed: int = 0
    """finished with status 500 or higher, or with such an error in the stream"""
    refused: int = 0
    """finished with 429"""
    tokens: int = 0
    """sent to clients"""
    ttft: list[int] = []
    """observations in each bucket of `BUCKETS` and above the last; empty: none"""
    itl: list[int] = []
    promised: int = 0
    """finished requests with an SLO"""
    kept: int = 0
    """finished requests that met their SLO"""


class Outage(Struct, frozen=True):
    """The reporting process is disconnected from NATS or etcd."""

    server: str
    """`NATS` or `etcd`"""
    address: str
    """without user name and password"""
    seconds: float
    """since the connection was lost"""
    why: str = ""
    """how the server ended, or its error; empty: not known"""


class LostProcess(Struct, frozen=True):
    """A process whose lease ended without a drain, and that no other has replaced."""

    id: str
    host: str
    seconds: float
    """since its lease ended"""
    model: str = ""


class ProcessReport(Struct, frozen=True):
    """The state of a process, as its page `/watch` has it."""

    load: Load = Load()
    links: list[LinkState] = []
    ticks: list[Tick] = []
    """of a frontend: newest last"""
    receipts: list[Receipt] = []
    """of a frontend, newest first: `MAX_REPORTED_RECEIPTS`, and up to `MAX_DETOURS` older ones with a hop of
    `DETOURS`"""
    outages: list[Outage] = []
    gone: list[LostProcess] = []
    """of a frontend"""


class OutageTracker:
    """Times the outages of a process's connections to NATS and etcd."""

    def __init__(self) -> None:
        self._servers: list[tuple[str, str, Callable[[], bool]]] = []
        self._lost: dict[str, float] = {}
        """by server: monotonic time of the first check that found the connection lost"""

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
        """Check regularly, so that an outage is timed even if nothing reads `outages`."""
        while True:
            self.outages()
            await tick(POLL_INTERVAL)
