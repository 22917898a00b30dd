"""Plugins: what only watches the requests of a frontend, or adds pages beside them.

The way of a request (`app.py`) answers the same without any plugin, and no error of one reaches a client. Each hangs on
the contract `Plugin`, and is loaded by its name in `PLUGINS`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Self

import httpx
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from pdserve.config.schema import FrontendConfig
from pdserve.contract.reports import Outage, ProcessReport, Receipt
from pdserve.frontend.edge.paths import WITH_BODY
from pdserve.frontend.edge.request_record import RequestRecord
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.edge.response import ResponseWriter
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.model.served_models import ServedModels
from pdserve.observe.tracing import Tracer
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Work, isolate_errors

PLUGINS = (
    "pdserve.frontend.observability.request_log:RequestLog",
    "pdserve.frontend.observability.spans:RequestSpans",
    "pdserve.frontend.observability.receipts:Receipts",
    "pdserve.frontend.observability.health:HealthPages",
    "pdserve.frontend.observability.metrics_page:MetricsPage",
    "pdserve.frontend.observability.dashboard.page:Dashboard",
    "pdserve.frontend.batches.routes:Batches",
)


@dataclass(frozen=True)
class PluginContext:
    """What a plugin may use of its frontend."""

    id: str
    """instance id"""
    model: str
    """the configured one"""
    models: ServedModels
    keys: ApiKeys
    view: RegistryView
    http: httpx.AsyncClient
    """for pages of other processes"""
    watched: Callable[[], ProcessReport]
    """this process now"""
    tracer: Tracer = field(default_factory=Tracer)
    running: dict[ResponseWriter, None] = field(default_factory=dict)
    """the requests to models that generate, which are not over"""
    app: Callable[[], ASGIApp] = NotImplemented
    """of this frontend, for requests of its own"""
    config: FrontendConfig = field(default_factory=FrontendConfig)
    draining: Callable[[], bool] = lambda: False
    outages: Callable[[], list[Outage]] = list
    """of this process's connections to servers"""


class Plugin:
    """One plugin; what it does not define it does not do."""

    routes: Sequence[Route] = ()
    open_paths: frozenset[str] = frozenset()
    """of its routes: need no API key"""
    local_paths: frozenset[str] = frozenset()
    """need none from clients on this machine, such as scrapers"""
    work: Mapping[str, Work] = {}
    """permanent background work, by name"""

    def __init__(self, context: PluginContext) -> None: ...

    def begin(self, request: Request, state: RequestState) -> None:
        """A request to a model that generates begins; its key is known."""

    def end(self, record: RequestRecord) -> None:
        """A request of a path in `WITH_BODY` is over."""

    def watched(self, watched: ProcessReport) -> ProcessReport:
        """Return what this process reports, with the plugin's part added."""
        return watched

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        """As `Service.receipts`."""
        return []


class Plugins:
    """The plugins of one frontend."""

    def __init__(self, context: PluginContext, plugins: Iterable[Plugin] = ()) -> None:
        self.context, self.plugins = context, list(plugins)
        self.routes = [route for plugin in self.plugins for route in plugin.routes]
        self.open_paths = frozenset(path for plugin in self.plugins for path in plugin.open_paths)
        self.local_paths = frozenset(path for plugin in self.plugins for path in plugin.local_paths)
        self.work = {name: work for plugin in self.plugins for name, work in plugin.work.items()}

    @classmethod
    def load(cls, context: PluginContext, names: Iterable[str] = PLUGINS) -> Self:
        """`names`: `module:class`."""
        named = (name.partition(":") for name in names)
        return cls(context, [getattr(import_module(module), kind)(context) for module, _, kind in named])

    def begin(self, request: Request, response: ResponseWriter) -> None:
        self.context.running[response] = None
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                plugin.begin(request, response.state)

    def end(self, response: ResponseWriter) -> None:
        begun = response in self.context.running
        self.context.running.pop(response, None)
        if response.state.path not in WITH_BODY or not (response.status or response.state.model):
            return  # a page; or its client left before the body was complete
        record = RequestRecord.of(response, self.context.id, begun=begun)
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                plugin.end(record)

    def watched(self, watched: ProcessReport) -> ProcessReport:
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                watched = plugin.watched(watched)
        return watched

    def receipts(self, limit: int, key: str | None = None, request_id: str = "") -> list[Receipt]:
        kept: list[Receipt] = []
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                kept += plugin.receipts(limit, key, request_id)
        return kept
