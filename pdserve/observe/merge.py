"""Several Prometheus pages as one: families of the same name together, each sample labelled with its
origin."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def merge(pages: Mapping[str, str]) -> bytes:
    """`pages` by instance id. Each sample gets a label `instance`, or, where it has one that means something
    else (the router's decisions), `source`. A page that cannot be parsed is left out."""
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
