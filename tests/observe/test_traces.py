"""How spans are sent or lost, and that docs/traces.md lists all spans."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from pdserve.contract.reports import HOPS
from pdserve.observe.otlp import END_WITHIN
from pdserve.observe.tracing import Tracer
from tests.collector import Collector, Exported, collecting
from tests.conditions import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/traces.md").read_text()
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
ROUTE = "POST {route}"


@cache
def documented(heading: str) -> Mapping[str, str]:
    """Return the table below this heading: each name in the first column -> the other columns."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.*) \|$", section, re.M)
    return {name: rest for names, rest in rows for name in re.findall("`([^`]+)`", names)}


def is_documented(span: Exported) -> bool:
    """Whether docs/traces.md lists the span and the span's events. Assert that the page lists their attributes, too."""
    name = ROUTE if span.name.startswith("POST /") else span.name
    where = {key: row.split(" | ")[0] for key, row in documented("Attributes").items()}
    told = [(name, key) for key in span.attributes]
    told += [(event, key) for event, said in span.events.items() for key in said]
    wrong = [
        (place, key)
        for place, key in told
        if f"`{place}`" not in where[key] and (place == ROUTE or not where[key].startswith("all but"))
    ]
    assert wrong == []
    return name in documented("Spans") and span.events.keys() <= documented("Events").keys()


def test_the_page_lists_each_span_event_and_attribute() -> None:
    files = [path.read_text() for path in (ROOT / "pdserve").rglob("*.py")]
    sources = [text for text in files if re.search("opentelemetry|tracing|[tT]racer", text)]
    of_asgi = r'http\.(?:disconnect|request|response\.(?:start|body))"'
    attributes = re.compile(rf'"(?!{of_asgi})(pdserve\.[a-z_]+|(?:gen_ai|http|url|error|service)\.[a-z_.]+)"')
    assert {name for text in sources for name in attributes.findall(text)} == documented("Attributes").keys()
    events = documented("Events").keys()
    assert events == {"fallback", "migration"} <= set(HOPS)
    spans = {name for text in sources for name in re.findall(r'\.(?:begin|part)\(\s*"([^"]+)"', text)}
    assert spans | set(HOPS) - events | {ROUTE} == documented("Spans").keys()


def test_the_sdk_is_not_imported_without_tracing() -> None:
    roles = "pdserve.decode.worker, pdserve.prefill.worker, pdserve.both.worker, pdserve.process.life"
    code = f"import sys, {roles}; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # must not apply to this machine's collector
    with collecting() as collector:
        yield collector


def send_spans(tracer: Tracer, count: int = 1) -> None:
    for _ in range(count):
        span = tracer.part("prefill", time.monotonic(), TRACEPARENT)
        assert span is not None
        span.end(time.monotonic())


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name != "asyncio"]


async def test_the_environment_overrides_the_name_of_a_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Tracer().exporting(f"{collector.url}/v1/traces", "pdserve-decode", "decode-0") as tracer:
        send_spans(tracer)
    assert [(span.service, span.process) for span in collector.spans] == [("pdserve-decode", "decode-0")]
    assert collector.posts == ["/v1/traces"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    async with Tracer().exporting(f"{collector.url}/v1/traces", "pdserve-decode", "decode-0") as tracer:
        send_spans(tracer)
    assert collector.spans[-1].service == "llm"


@pytest.mark.parametrize("broken", ["closed", "503", "silent"])
async def test_lost_spans_are_logged_at_most_twice(
    collector: Collector, broken: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    url = "http://127.0.0.1:9" if broken == "closed" else collector.url
    if broken == "silent":
        collector.answers.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")  # longer than closing the tracer may take
    elif broken != "closed":
        collector.status = int(broken)
    async with Tracer().exporting(f"{url}/v1/traces", "pdserve-decode", "decode-0") as tracer:
        began = time.monotonic()
        send_spans(tracer, 300)
        assert time.monotonic() - began < 10, "a request waits for no batch"
        await until(lambda: bool(losses(caplog)), within=30)
        send_spans(tracer, 300)
        ending = time.monotonic()
    assert time.monotonic() - ending < END_WITHIN + 2.5
    lines = losses(caplog)
    assert len(lines) <= 2
    assert all(re.match("Queue full|Transient error|Failed to export", line) for line in lines), lines
    collector.answers.set()


async def test_text_of_clients_is_not_logged(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"traceparent": [TRACEPARENT], "tracestate": ["bad bad bad"]}
    async with Tracer().exporting(f"{collector.url}/v1/traces", "pdserve-frontend", "frontend-0") as tracer:
        span = tracer.request("POST /", 0.0, headers, {})
        assert span is not None
        assert span.trace_id == TRACE
    assert losses(caplog) == []
