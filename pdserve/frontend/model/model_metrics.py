"""vLLM's own per-request metrics of every model in this process, on one page."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ModelMetrics(Collector):
    """Collects a registry per model as one. Gauges are left out: they describe an engine, and there is none
    here."""

    def __init__(self) -> None:
        self._registries: list[CollectorRegistry] = []

    def describe(self) -> list[Metric]:
        return []  # names are not claimed: they are the same for each model

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                if metric.type == "gauge":
                    continue
                known = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                known.samples += metric.samples
        yield from merged.values()

    @contextmanager
    def model(self) -> Iterator[CollectorRegistry]:
        """A registry that is shown for as long as the model is served."""
        registry = CollectorRegistry()
        self._registries.append(registry)
        try:
            yield registry
        finally:
            self._registries.remove(registry)


MODEL_METRICS = ModelMetrics()
REGISTRY.register(MODEL_METRICS)
