"""The pages that the frontend answers itself: health, load, versions, metrics, the list of models."""

import asyncio
import time
from functools import cache

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

import pdserve
from pdserve.config.host import installed_vllm
from pdserve.frontend.answer import HttpError, error_response
from pdserve.frontend.auth import ApiKeys, is_local
from pdserve.frontend.model.openapi import LEFT_OUT
from pdserve.frontend.models import ServedModels
from pdserve.observe.metrics import SlotMetrics, merge
from pdserve.records import Instance, ModelCard
from pdserve.registry.view import RegistryView

FETCH_WITHIN = 0.5
"""seconds for the pages of all other processes: what does not answer is left out"""
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
        others = [other for other in self._view.instances() if other.metrics and other.id != self.own]
        if len(others) > MAX_MERGED:
            others = []
        texts = await asyncio.gather(*(self._fetch(other) for other in others))
        pages = {other.id: text for other, text in zip(others, texts, strict=True) if text}
        pages[self.own] = generate_latest().decode()
        pages["serve"] = self._slots()
        return await asyncio.to_thread(merge, pages)

    def _slots(self) -> str:
        """The supervisors have no page of their own: what they know is in the registry."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SlotMetrics(self._view.slots()))
        return generate_latest(registry).decode()

    async def _fetch(self, instance: Instance) -> str:
        """Empty where there is no page."""
        try:
            async with asyncio.timeout(FETCH_WITHIN):
                answer = await self._client.get(instance.metrics)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return ""
        return answer.text if answer.status_code == 200 else ""


class FrontendPages:
    """An ASGI app. Raises HttpError for what there is no page for."""

    def __init__(self, models: ServedModels, metrics: MetricsPage, keys: ApiKeys) -> None:
        self._models = models
        self._keys = keys
        self._metrics = metrics
        routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
            Route("/metrics", self._metrics_page),
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._list),
        ]
        self.paths = frozenset(route.path for route in routes)
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router({**scope, "app": self}, receive, send)  # with an app, a wrong method raises
        except HTTPException as error:
            methods = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
            answer = error_response(scope["path"], error.status_code, f"{scope['path']} takes {methods}")
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

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._models.load()})

    async def _version(self, _: Request) -> Response:
        return JSONResponse(_versions())

    async def _metrics_page(self, _: Request) -> Response:
        page = await self._metrics.get()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list(self, request: Request) -> Response:
        """All models, or the one that the path names."""
        cards, name = self._models.listed(), request.path_params.get("name")
        if not name:
            return JSONResponse({"object": "list", "data": [_listing(card) for card in cards]})
        for card in cards:
            if card.name == name:
                return JSONResponse(_listing(card))
        raise HttpError(404, f"The model `{name}` does not exist.", "model")


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
