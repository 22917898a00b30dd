"""The pages that the frontend answers itself: health, load, versions, metrics, receipts, the list of models."""

import asyncio
import time
from functools import cache

import httpx
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

import pdserve
from pdserve.config.host import installed_vllm
from pdserve.frontend.edge.answer import HttpError, error_response
from pdserve.frontend.keys.auth import ApiKeys, is_local
from pdserve.frontend.model.openapi import LEFT_OUT
from pdserve.frontend.model.served import ServedModels
from pdserve.frontend.watching.dashboard.page import Dashboard, Viewer
from pdserve.frontend.watching.receipts import Receipts
from pdserve.observe.metrics import MergedPage, SlotMetrics
from pdserve.observe.pages import read_receipts
from pdserve.records import Instance, ModelCard
from pdserve.registry.view import RegistryView
from pdserve.watch import KEPT_FOR, MAX_TOLD, MOST_KEPT, Receipt, newest

FETCH_WITHIN = 0.5
"""seconds for the pages of all other processes: what does not answer is left out"""
MAX_ASKING = 4
"""requests for receipts that ask the other frontends at the same time"""
KEPT = 1.0
"""seconds for which a page is given again: many scrapers must not multiply the work in every process"""

MAX_MERGED = 100
"""other processes whose pages are merged into one: with more, reading and parsing them would take a frontend seconds,
and each has its own page (`Instance.metrics`) for a scraper that finds them all"""


class MetricsPage:
    """The graph's metrics on one page: those of this process, whose instance id is `own`, and of every other process
    that the registry has."""

    def __init__(self, view: RegistryView, own: str, client: httpx.AsyncClient) -> None:
        self._view = view
        self.own = own
        self._client = client
        self._making = asyncio.Lock()
        self._page = b""
        self._made = float("-inf")
        """monotonic"""

    async def get(self) -> bytes:
        async with self._making:
            if time.monotonic() - self._made > KEPT:
                self._page = await self._make()
                self._made = time.monotonic()
            return self._page

    async def _make(self) -> bytes:
        page = MergedPage()
        page.add(self.own, generate_latest().decode())
        page.add("serve", self._slots())
        others = [other for other in self._view.instances() if other.metrics and other.id != self.own]
        if len(others) <= MAX_MERGED:
            await asyncio.gather(*(self._fetch(other, page) for other in others))
        return page.text()

    def _slots(self) -> str:
        """The supervisors have no page of their own: what they know is in the registry."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SlotMetrics(self._view.slots()))
        return generate_latest(registry).decode()

    async def _fetch(self, instance: Instance, page: MergedPage) -> None:
        """A process that does not answer is left out. Its page is merged when it comes and in the event loop, where a
        page takes a fraction of a millisecond; a thread for all of them would hold the GIL for several at a time."""
        try:
            async with asyncio.timeout(FETCH_WITHIN):
                answer = await self._client.get(instance.metrics)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return
        if answer.status_code == 200:
            page.add(instance.id, answer.text)


class FrontendPages:
    """An ASGI app. Raises HttpError for what there is no page for."""

    def __init__(
        self,
        models: ServedModels,
        metrics: MetricsPage,
        keys: ApiKeys,
        receipts: Receipts,
        dashboard: Dashboard | None = None,
    ) -> None:
        self._models = models
        self._receipts = receipts
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._keys = keys
        self._metrics = metrics
        routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
            Route("/metrics", self._metrics_page),
            Route("/requests", self._requests),
            Route("/requests/{id}", self._request),
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._list),
            *(dashboard.routes(self._viewer) if dashboard else []),
        ]
        self.paths = frozenset(route.path for route in routes)
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router({**scope, "app": self}, receive, send)  # with an app, a wrong method raises
        except HTTPException as error:
            methods = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
            wrong = HttpError(error.status_code, f"{scope['path']} takes {methods}")
            answer = error_response(scope["path"], wrong)
            answer.headers["allow"] = methods
            await answer(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        missing, degraded = self._models.missing(), self._models.degraded()
        status = "unavailable" if missing else "degraded" if degraded else "ok"
        health: dict[str, object] = {"status": status}
        if not is_local(request.scope) and not self._keys.knows(request.headers):
            return JSONResponse(health, 503 if missing else 200)
        health |= {"workers": self._models.live(), "frontend": self._metrics.own}
        if missing:
            health["missing"] = missing
        if degraded:
            health["degraded"] = degraded
        return JSONResponse(health, 503 if missing else 200)

    def _viewer(self, request: Request) -> Viewer:
        key = self._keys.find(request.scope["path"], request.headers)
        return Viewer(key.name, key.admin) if key else Viewer()

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._models.load()})

    async def _version(self, _: Request) -> Response:
        return JSONResponse(_versions())

    async def _metrics_page(self, _: Request) -> Response:
        page = await self._metrics.get()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _requests(self, request: Request) -> Response:
        limit = request.query_params.get("limit", "20")
        if not limit.isdecimal() or len(limit) > 9 or not 0 < int(limit) <= MAX_TOLD:
            raise HttpError(400, f"limit must be a whole number from 1 to {MAX_TOLD}", "limit")
        found = await self._find(request, int(limit))
        return _json({"object": "list", "data": found})

    async def _request(self, request: Request) -> Response:
        request_id = request.path_params["id"]
        if found := await self._find(request, 1, request_id):
            return _json(found[0])
        kept = f"of the last {MOST_KEPT:,} requests of each frontend, for {KEPT_FOR / 60:g} minutes"
        raise HttpError(404, f"there is no receipt of the request {request_id}: they are kept {kept}")

    async def _find(self, request: Request, limit: int, request_id: str = "") -> list[Receipt]:
        """Receipts that the request's key may see, of all frontends; of one id, of this frontend if it has it."""
        viewer = self._viewer(request)
        asked = limit, None if viewer.everything else viewer.key, request_id
        found = self._receipts.newest(*asked)
        others = [other for other in self._models.frontends() if other.id != self._metrics.own]
        if others and not (request_id and found):
            async with self._asking:
                found = newest(limit, found, await read_receipts(others, *asked))
        return found

    async def _list(self, request: Request) -> Response:
        """All models, or the one that the path names."""
        cards, name = self._models.listed(), request.path_params.get("name")
        if not name:
            return JSONResponse({"object": "list", "data": [_listing(card) for card in cards]})
        for card in cards:
            if card.name == name:
                return JSONResponse(_listing(card))
        raise HttpError(404, f"The model `{name}` does not exist.", "model")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


@cache
def _versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": installed_vllm().version}


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


async def _not_found(scope: Scope, _: Receive, __: Send) -> None:
    path = scope["path"]
    if LEFT_OUT.fullmatch(path):
        raise HttpError(404, f"{path} is not available on a separated graph")
    raise HttpError(404, f"there is no {path}")
