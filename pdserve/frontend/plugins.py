"""The frontend's plugins: they observe its requests, or add pages to it.

Plugins change no model's response (`app.py`), and their errors while they observe a request do not reach its client.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Self

import httpx
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.config.schema import FrontendConfig
from pdserve.contract.records import Adapter, ModelCard
from pdserve.contract.reports import Outage, ProcessReport, Receipt
from pdserve.frontend.edge.paths import WITH_BODY
from pdserve.frontend.edge.request_record import RequestRecord
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.edge.response import HttpError, ResponseWriter, error_response
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.model.served_models import ServedModels
from pdserve.frontend.vllm.openapi import LEFT_OUT
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
    """What plugins may use of their frontend."""

    id: str
    """Instance id."""
    model: str
    """Name of the configured model."""
    models: ServedModels
    keys: ApiKeys
    view: RegistryView
    http: httpx.AsyncClient
    """Fetches pages of other processes."""
    report: Callable[[], ProcessReport]
    tracer: Tracer = field(default_factory=Tracer)
    running: dict[ResponseWriter, None] = field(default_factory=dict)
    """Running requests that generate."""
    app: Callable[[], ASGIApp] = NotImplemented
    """This frontend's app, for requests that a plugin makes."""
    config: FrontendConfig = field(default_factory=FrontendConfig)
    draining: Callable[[], bool] = lambda: False
    outages: Callable[[], list[Outage]] = list
    """This process's broken connections to servers."""


class Plugin:
    """A plugin overrides what it needs."""

    routes: Sequence[Route] = ()
    open_paths: frozenset[str] = frozenset()
    """Paths that need no API key."""
    local_paths: frozenset[str] = frozenset()
    """Paths that need no API key from clients on this machine, such as scrapers."""
    work: Mapping[str, Work] = {}
    """Permanent background tasks by name."""

    def __init__(self, context: PluginContext) -> None: ...

    def begin(self, request: Request, state: RequestState) -> None:
        """A request that generates begins; its key is known."""

    def end(self, record: RequestRecord) -> None:
        """A request of a path in `WITH_BODY` has ended. Not called if its client left while sending the body."""

    def add_to_report(self, report: ProcessReport) -> ProcessReport:
        """Return this process's report with the plugin's part added."""
        return report

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        """Return the plugin's receipts, for `Service.receipts`."""
        return []


class Plugins:
    def __init__(self, context: PluginContext, plugins: Iterable[Plugin] = ()) -> None:
        self.context = context
        self.plugins = list(plugins)
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
            return  # a page, or the client disconnected before the body was complete
        record = RequestRecord.of(response, self.context.id, begun=begun)
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                plugin.end(record)

    def add_to_report(self, report: ProcessReport) -> ProcessReport:
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                report = plugin.add_to_report(report)
        return report

    def receipts(self, limit: int, key: str | None = None, request_id: str = "") -> list[Receipt]:
        found: list[Receipt] = []
        for plugin in self.plugins:
            with isolate_errors("plugin"):
                found += plugin.receipts(limit, key, request_id)
        return found


class FrontendPages:
    """The ASGI app for all pages that no model's app has: the list of models, and the plugins' pages. Raises HttpError
    for paths without a page."""

    def __init__(self, models: ServedModels, plugin_routes: Sequence[Route]) -> None:
        self._models = models
        own = [Route("/v1/models", self._list), Route("/v1/models/{name:path}", self._list)]
        self._routes = [*own, *plugin_routes]
        self.paths = frozenset(route.path for route in self._routes)
        self._router = Router(self._routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # with `app` in the scope, Starlette raises for a wrong method
            await self._router({**scope, "app": self}, receive, send)
        except HTTPException as error:
            matching = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
            methods = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
            wrong_method = HttpError(error.status_code, f"{scope['path']} takes {methods}")
            response = error_response(scope["path"], wrong_method)
            response.headers["allow"] = methods
            await response(scope, receive, send)

    async def _list(self, request: Request) -> Response:
        listings = [_listing(card) for card in self._models.listed()]
        listings += [_adapter_listing(*adapter) for adapter in self._models.adapters()]
        if not (name := request.path_params.get("name")):
            return JSONResponse({"object": "list", "data": listings})
        for listing in listings:
            if listing["id"] == name:
                return JSONResponse(listing)
        raise HttpError(404, f"The model `{name}` does not exist.", "model")


def json_response(content: object) -> Response:
    """Return a JSON response; `content` may hold msgspec's structs."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def query_limit(request: Request, default: int, most: int) -> int:
    """The query parameter `limit`. Raises HttpError."""
    limit = request.query_params.get("limit", str(default))
    if not limit.isdecimal() or len(limit) > 9 or not 0 < int(limit) <= most:
        raise HttpError(400, f"limit must be a whole number from 1 to {most}", "limit")
    return int(limit)


def _listing(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "root": card.model,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _adapter_listing(card: ModelCard, adapter: Adapter) -> dict[str, object]:
    own = {"id": adapter.name, "root": adapter.path, "parent": card.name, "max_model_len": None}
    return _listing(card) | own


async def _not_found(scope: Scope, _: Receive, __: Send) -> None:
    path = scope["path"]
    if LEFT_OUT.fullmatch(path):
        raise HttpError(404, f"{path} is not available on a disaggregated graph")
    raise HttpError(404, f"there is no {path}")
