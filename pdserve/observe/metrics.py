"""The metrics that monitoring relies on, all in one place (DESIGN §7), in seconds and bytes as Prometheus wants, and
several processes' pages of them merged into one."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdserve.records import SlotState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# frontend
REQUESTS = Counter("pdserve_requests_total", "HTTP requests answered", ["model", "code"])
KEY_REQUESTS = Counter("pdserve_key_requests_total", "HTTP requests answered, by API key", ["key", "code"])
KEY_TOKENS = Counter("pdserve_key_tokens_total", "Tokens of an API key: prompt, output", ["key", "kind"])
TTFT = Histogram("pdserve_ttft_seconds", "Request in to first token out", ["model"], buckets=_SECONDS)
ITL = Histogram("pdserve_itl_seconds", "Time between a stream's tokens", ["model"], buckets=_SECONDS)
E2E = Histogram("pdserve_e2e_seconds", "Request in to last token out", ["model"], buckets=_SECONDS)
WAITING = Gauge("pdserve_waiting_requests", "Requests that wait in this frontend for their turn", ["model"])
CONNECTIONS_CLOSED = Counter(
    "pdserve_connections_closed_total",
    "Connections closed by the server: unread answers, heads that do not come, refused requests, limits, handshakes",
    ["reason"],
)
STORED_RESPONSES = Counter(
    "pdserve_stored_responses_total", "Times that a response was stored, or was not and why", ["result"]
)
STORED_BYTES = Counter("pdserve_stored_response_bytes_total", "Bytes of stored responses, compressed")
MIGRATIONS = Counter("pdserve_migrations_total", "Requests moved to another decode worker", ["model"])
ROUTER_DECISIONS = Counter(
    "pdserve_router_decisions_total", "Requests sent to a decode worker", ["policy", "instance"]
)
INSTANCES = Gauge("pdserve_instances", "Live instances, as this frontend sees the registry", ["role"])

# decode worker
PREFILL = Counter("pdserve_prefill_total", "Where prompts were prefilled, and why", ["mode", "reason"])
REMOTE_PREFILL_FAILURES = Counter(
    "pdserve_remote_prefill_failures_total", "Remote prefills that were done again locally", ["reason"]
)
QUEUE_DEPTH = Gauge("pdserve_prefill_queue_depth", "Prefill requests not yet pulled")
KV_TRANSFER_SECONDS = Histogram("pdserve_kv_transfer_seconds", "One request's KV pull", buckets=_SECONDS)
KV_TRANSFER_BYTES = Counter("pdserve_kv_transfer_bytes_total", "KV bytes pulled")
WARM_UPS = Counter(
    "pdserve_warm_ups_total",
    "First KV pulls between a decode and a prefill worker, of a prompt of their own; only transfers count them too",
    ["result"],
)

# prefill worker
QUEUE_WAIT = Histogram("pdserve_prefill_queue_wait_seconds", "Enqueued to pulled", buckets=_SECONDS)

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
    """The state of the processes that supervisors keep alive, as the registry has it."""

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


def merge(pages: Mapping[str, str]) -> bytes:
    """Make one page of several, given by instance id. Families of the same name come together; each sample gets a label
    `instance`, or, where it has one that means something else (the router's decisions), `source`. A page that cannot
    be parsed is left out."""
    families: dict[str, Metric] = {}
    for instance, page in pages.items():
        for family in _parse(page):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if known.type == family.type:
                known.samples += [_labelled(sample, instance) for sample in family.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry)


def _parse(page: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(page))
    except ValueError:
        return []


def _labelled(sample: Sample, instance: str) -> Sample:
    name = "source" if "instance" in sample.labels else "instance"
    return sample._replace(labels={**sample.labels, name: instance})


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
