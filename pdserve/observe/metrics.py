"""All metrics (docs/metrics.md), in seconds and bytes as Prometheus wants, and how several processes' pages of them are
merged into one."""

import re
from collections.abc import Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.records import SlotState
from pdserve.watch import BUCKETS

disable_created_metrics()  # type: ignore[no-untyped-call]  # gauges that Prometheus does not use

# frontend
REQUESTS = Counter("pdserve_requests_total", "HTTP requests answered", ["model", "code"])
KEY_REQUESTS = Counter("pdserve_key_requests_total", "HTTP requests answered, by API key", ["key", "code"])
KEY_TOKENS = Counter("pdserve_key_tokens_total", "Tokens of an API key: prompt, output", ["key", "kind"])
TTFT = Histogram("pdserve_ttft_seconds", "Request in to first token out", ["model"], buckets=BUCKETS)
ITL = Histogram("pdserve_itl_seconds", "Time between a stream's tokens", ["model"], buckets=BUCKETS)
E2E = Histogram(
    "pdserve_e2e_seconds", "Request in to last token out, of whole answers", ["model"], buckets=BUCKETS
)
WAITING = Gauge("pdserve_waiting_requests", "Requests that wait in this frontend for their turn", ["model"])
RUNNING = Gauge("pdserve_running_requests", "Sequences of this frontend at decode workers", ["model"])
LINKS = Gauge(
    "pdserve_links", "Decode workers to which this frontend has a connection (up) or none", ["model", "state"]
)
CONNECTIONS_CLOSED = Counter(
    "pdserve_connections_closed_total",
    "Connections closed by the server: unread answers, heads that do not come, refused requests, limits, handshakes",
    ["reason"],
)
MIGRATIONS = Counter(
    "pdserve_migrations_total",
    "Requests that a decode worker lost and another takes, and why",
    ["model", "reason"],
)
ROUTER_DECISIONS = Counter(
    "pdserve_router_decisions_total", "Requests sent to a decode worker", ["policy", "instance"]
)
IN_FLIGHT = Gauge(
    "pdserve_requests_in_flight", "Sequences that a decode worker generates for this frontend", ["instance"]
)
INSTANCES = Gauge("pdserve_instances", "Live instances, as this frontend sees the registry", ["role"])

# decode worker
PREFILL = Counter(
    "pdserve_prefill_total", "Where prompts were prefilled, and why", ["model", "mode", "reason"]
)
REMOTE_PREFILL_FAILURES = Counter(
    "pdserve_remote_prefill_failures_total",
    "Remote prefills that were done again locally, and why",
    ["model", "reason"],
)
QUEUE_DEPTH = Gauge("pdserve_prefill_queue_depth", "Prefill requests not yet pulled", ["model"])
KV_TRANSFER_SECONDS = Histogram(
    "pdserve_kv_transfer_seconds",
    "The decode engine waits for a request's KV, which it reads; once for each request",
    ["model"],
    buckets=BUCKETS,
)
KV_TRANSFER_BYTES = Counter(
    "pdserve_kv_transfer_bytes_total", "KV bytes read, of warm-ups and of pieces read ahead, too", ["model"]
)
HANDSHAKE_FAILURES = Counter(
    "pdserve_kv_handshake_failures_total",
    "Times that a prefill worker did not answer when it was asked how to read its KV",
    ["model", "worker"],
)
WARM_UPS = Counter(
    "pdserve_warm_ups_total",
    "First KV pulls between a decode and a prefill worker, of a prompt of their own, which no other metric of requests "
    "counts",
    ["model", "result"],
)

# prefill worker
QUEUE_WAIT = Histogram(
    "pdserve_prefill_queue_wait_seconds",
    "Enqueued to pulled, for the first time",
    ["model"],
    buckets=BUCKETS,
)

# decode and prefill worker
ENGINE_REQUESTS = Gauge(
    "pdserve_engine_requests", "Requests in the engine, or on their way into it", ["model", "state"]
)
KV_USAGE = Gauge("pdserve_kv_usage_ratio", "Share of the engine's KV blocks in use", ["model"])

# every process
TASK_FAILURES = Counter(
    "pdserve_task_failures_total",
    "Background tasks that failed; those that have to go on were restarted",
    ["task"],
)
TASKS = Gauge(
    "pdserve_tasks", "asyncio tasks of this process's event loop: back at its idle value when nothing runs"
)


class SlotMetrics(Collector):
    """The state of the processes that supervisors keep alive, from the registry."""

    def __init__(self, slots: Iterable[SlotState]) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        labels = ["slot", "host"]
        ready = GaugeMetricFamily("pdserve_slot_ready", "1: the process is there and ready", labels=labels)
        restarts = CounterMetricFamily("pdserve_restarts", "Restarts since `serve` started", labels=labels)
        for slot in self._slots:
            ready.add_metric([slot.name, slot.host], slot.ready)
            restarts.add_metric([slot.name, slot.host], slot.restarts)
        yield from (ready, restarts)


# pages


class MergedPage:
    """Merge several processes' pages into one. Families of the same name come together; each sample gets a label
    `instance`, or `source` where its own `instance` means something else (the router's decisions). Works on the text:
    parsing a page takes twenty times as long, which would delay the streams of a frontend."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}
        """by name: the lines HELP and TYPE, then the samples"""

    def add(self, instance: str, page: str) -> None:
        """Leave out lines that are no samples, and a family whose type differs from that in an earlier page: Prometheus
        would refuse the whole page for either."""
        for family in f"\n{page}".split("\n# HELP ")[1:]:
            about, kind, *samples = family.split("\n")
            lines = self._families.setdefault(about.partition(" ")[0], [f"# HELP {about}", kind])
            if lines[1] == kind:
                lines += _labelled(samples, instance)

    def text(self) -> bytes:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines).encode()


_sample = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)").fullmatch
_has_instance = re.compile(r'(?:.*",)?instance="').match


def _labelled(samples: Iterable[str], instance: str) -> Iterator[str]:
    for name, labels, value in (found.groups("") for found in map(_sample, samples) if found):
        label = "source" if _has_instance(labels) else "instance"
        yield f'{name}{{{label}="{instance}"{"," if labels else ""}{labels}}} {value}'
