"""All Prometheus metrics (docs/metrics.md), in seconds and bytes, and `MergedPage`, which merges the metrics pages of
several processes."""

import re
from collections.abc import Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.contract.records import SlotState
from pdserve.contract.reports import BUCKETS

disable_created_metrics()  # type: ignore[no-untyped-call]  # gauges that Prometheus does not use

# frontend, decode
BACKLOG = Gauge(
    "pdserve_backlog_seconds",
    "seconds that one worker needs for the backlog (docs/metrics.md); `role`: `decode` (requests in frontends), "
    "`prefill` (prompts of decode workers that no engine has)",
    ["model", "role"],
)
USABLE_WORKERS = Gauge(
    "pdserve_usable_workers",
    "workers to which this process would send requests now; `role`: `decode` (in frontends, without stand-ins; NaN "
    "while its tokenizer loads), `prefill` (in decode workers)",
    ["model", "role"],
)

# frontend
REQUESTS = Counter(
    "pdserve_requests_total",
    "HTTP requests by status, or error in a stream; 499: the client disconnected. `model` is empty for unknown models",
    ["model", "code"],
)
SLO = Counter(
    "pdserve_slo_total",
    "finished requests with an SLO; `outcome`: `kept`, `ttft` (the first token was late), `gap` (a later token was "
    "late), `failed` (429 or 5xx)",
    ["model", "outcome"],
)
KEY_REQUESTS = Counter("pdserve_key_requests_total", "HTTP requests by API key and status", ["key", "code"])
KEY_TOKENS = Counter(
    "pdserve_key_tokens_total", "tokens by API key; `kind`: `prompt`, `output`", ["key", "kind"]
)
TTFT = Histogram(
    "pdserve_ttft_seconds",
    "from a request's arrival to its first token; one observation per request",
    ["model"],
    buckets=BUCKETS,
)
ITL = Histogram("pdserve_itl_seconds", "time between two tokens of a stream", ["model"], buckets=BUCKETS)
E2E = Histogram(
    "pdserve_e2e_seconds",
    "from a request's arrival to the end of its complete response",
    ["model"],
    buckets=BUCKETS,
)
WAITING = Gauge("pdserve_waiting_requests", "requests in this frontend's admission queue", ["model"])
RUNNING = Gauge(
    "pdserve_running_requests",
    "sequences (4 of a request with n=4) of this frontend that decode workers run",
    ["model"],
)
LINKS = Gauge(
    "pdserve_links",
    "registered decode workers, by this frontend's connection; `state`: `up`, `down`",
    ["model", "state"],
)
CONNECTIONS_CLOSED = Counter(
    "pdserve_connections_closed_total",
    "connections that the server closed; `reason`: `unread` (the client does not read), `head` (incomplete "
    "request head), `refused` (not HTTP), `limit` (too many), `handshake` (TLS)",
    ["reason"],
)
MIGRATIONS = Counter(
    "pdserve_migrations_total",
    "sequences that continued on another decode worker after a loss; `reason`: `gone` (no connection), "
    "`engine-died`, `failed` (the worker drains, or its log says why), `gave-up` (its engine ended the request), "
    "`unreadable` (its outputs), `handed-over` (from a prefill worker that stood in), "
    "`stalled` (before their first token)",
    ["model", "reason"],
)
ROUTER_DECISIONS = Counter(
    "pdserve_router_decisions_total",
    "requests sent to a decode worker; `policy`: `round-robin`, `least-loaded`, `kv`",
    ["policy", "instance"],
)
IN_FLIGHT = Gauge(
    "pdserve_requests_in_flight",
    "sequences that this decode worker generates for this frontend; absent without a connection",
    ["instance"],
)
INSTANCES = Gauge(
    "pdserve_instances",
    "registered processes; `role`: `frontend`, `decode`, `prefill`, `both`",
    ["role"],
)
BATCHES = Gauge("pdserve_open_batches", "batches that are not closed, of all API keys", ["folder"])
BATCH_LINES = Counter(
    "pdserve_batch_lines_total", "batch lines that ended; `outcome`: `completed`, `failed`", ["outcome"]
)
BATCHES_FREE = Gauge("pdserve_batches_free_bytes", "free bytes of the disk of `Frontend.batches`", ["folder"])
SLOT_READY = Gauge(
    "pdserve_slot_ready",
    "1: the process of this slot (`decode-0`) is ready; 0: it is not, does not respond, or its lease ended without a "
    "drain in the last 10 minutes and no other has replaced it. The minimum over all frontends counts",
    ["slot", "host"],
)
WORKERS_REPLACED = Counter(
    "pdserve_workers_replaced_total",
    "workers whose lease ended without a drain and that another one replaced; `role`: `decode`, `prefill`, `both`",
    ["model", "role"],
)

# decode
PREFILL = Counter(
    "pdserve_prefill_total",
    "prompts by where they were computed, and the reason (docs/metrics.md)",
    ["model", "mode", "reason"],
)
REMOTE_PREFILL_FAILURES = Counter(
    "pdserve_remote_prefill_failures_total",
    "failed remote prefills, by reason (docs/metrics.md)",
    ["model", "reason"],
)
KV_TRANSFER_SECONDS = Histogram(
    "pdserve_kv_transfer_seconds",
    "time for which the decode engine waited for KV; one observation per request",
    ["model"],
    buckets=BUCKETS,
)
KV_TRANSFER_BYTES = Counter(
    "pdserve_kv_transfer_bytes_total", "bytes of KV read, including warm-ups and read-ahead", ["model"]
)
HANDSHAKE_FAILURES = Counter(
    "pdserve_kv_handshake_failures_total",
    "unanswered handshakes to read a prefill worker's KV; `worker`: its id",
    ["model", "worker"],
)
WARM_UPS = Counter(
    "pdserve_warm_ups_total",
    "warm-up reads of KV between a decode and a prefill worker; `result`: `ok`, `failed`",
    ["model", "result"],
)

# prefill
QUEUE_WAIT = Histogram(
    "pdserve_prefill_queue_wait_seconds",
    "from the publishing of a prompt to its first pull",
    ["model"],
    buckets=BUCKETS,
)

# decode, prefill
QUEUE_DEPTH = Gauge(
    "pdserve_prefill_queue_depth", "prompts in the prefill queue, as each worker sees it", ["model"]
)
ENGINE_REQUESTS = Gauge(
    "pdserve_engine_requests",
    "requests in the engine; `state`: `running` (in its batch), `waiting` (for room or KV); `role`: `decode`, "
    "`prefill`, `both`",
    ["model", "role", "state"],
)
ENGINE_STALLED = Gauge(
    "pdserve_engine_stalled",
    "1 while the engine neither replies nor computes, so that its worker gets no new requests (docs/liveness.md); "
    "`role`: `decode`, `prefill`, `both`",
    ["model", "role"],
)
KV_USAGE = Gauge(
    "pdserve_kv_usage_ratio",
    "share of the engine's KV blocks in use; `role`: `decode`, `prefill`, `both`",
    ["model", "role"],
)

# all
CONNECTED = Gauge(
    "pdserve_connected", "1: this process is connected to the `server`: `NATS`, `etcd`", ["server"]
)
CERTIFICATE_END = Gauge(
    "pdserve_certificate_end_seconds",
    "Unix time at which a loaded certificate expires; `certificate`: `graph` (`Security.credentials`), `api` "
    "(`Security.tls-certificate`)",
    ["certificate"],
)
TASK_FAILURES = Counter(
    "pdserve_task_failures_total", "failures of background tasks, which are restarted: bugs", ["task"]
)
TASKS = Gauge("pdserve_tasks", "asyncio tasks; tasks leak if this grows without requests")


class SlotMetrics(Collector):
    """Metrics of the slots that supervisors report in the registry."""

    def __init__(self, slots: Iterable[SlotState]) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        text = "restarts of the process since `serve` started"
        restarts = CounterMetricFamily("pdserve_restarts", text, labels=["slot", "host"])
        for slot in self._slots:
            restarts.add_metric([slot.name, slot.host], slot.restarts)
        yield restarts


# pages


class MergedPage:
    """Merges the metrics pages of several processes. Each sample gets a label `instance`, or `source` if it has an
    `instance` of its own (router decisions). Merges text, because parsing takes twenty times as long and would delay
    tokens."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}
        """By name: the lines HELP and TYPE, then the samples."""

    def add(self, instance: str, page: str) -> None:
        """Add a page. Lines that are not samples, and families of another type than on an earlier page, are left out:
        Prometheus would refuse the merged page."""
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
