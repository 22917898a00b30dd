"""Start a whole pdserve graph with real engines as a user does: `pdserve serve -f FILE`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from pdserve.config.load import load
from pdserve.frontend.observability.metrics_page import KEPT
from tests.serving import Serve, running

_START_SECONDS = 420.0


class RealGraph(Serve):
    def __init__(self, folder: Path, yaml: str) -> None:
        super().__init__(folder, yaml)
        frontend = load(self.file, self.env).frontend
        assert frontend is not None
        self.port = frontend.port
        self._kept_until = 0.0

    def metrics(self) -> "Metrics":
        """Return the frontend's current merged metrics. First, wait until the page that the frontend has kept since the
        last call has expired."""
        time.sleep(max(0.0, self._kept_until - time.monotonic()))
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        self._kept_until = time.monotonic() + KEPT + 0.1
        return Metrics(page)


@dataclass
class Metrics:
    page: str

    def __call__(self, name: str, **labels: str) -> float:
        """Sum a metric over all instances; 0 if absent."""
        return sum(value for has, value in self._samples(name) if labels.items() <= has.items())

    def values(self, name: str, label: str) -> set[str]:
        """Return the values of a label in samples that are not 0."""
        return {has[label] for has, value in self._samples(name) if value}

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.page):
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value


@contextmanager
def serving(yaml: str, folder: Path, env: Mapping[str, str] | None = None) -> Iterator[RealGraph]:
    """Start a graph from `yaml`, wait until it responds, and stop it with Ctrl-C; its exit code must be 0."""
    graph = RealGraph(folder, yaml)
    graph.env |= env or {}
    with running(graph, _START_SECONDS):
        yield graph
