"""`/health`, for probes and for `pdserve serve`, and the pages beside it that say what runs here."""

from functools import cache

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import pdserve
from pdserve.config.host import installed_vllm
from pdserve.frontend.keys.auth import is_local
from pdserve.frontend.ribs import Rib, RibContext


class HealthPages(Rib):
    open_paths = frozenset({"/health", "/ping"})
    """a probe from elsewhere, without a key, gets the status alone"""
    local_paths = frozenset({"/load", "/version"})

    def __init__(self, context: RibContext) -> None:
        self._own, self._models = context.id, context.models
        self._keys, self._view = context.keys, context.view
        self.routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
        ]

    async def _health(self, request: Request) -> Response:
        missing = self._models.missing()
        degraded = {f"{slot.name}@{slot.host}": str(slot) for slot in self._view.slots() if not slot.ready}
        status = "unavailable" if missing else "degraded" if degraded else "ok"
        health: dict[str, object] = {"status": status}
        if not is_local(request.scope) and not self._keys.knows(request.headers):
            return JSONResponse(health, 503 if missing else 200)
        health |= {"workers": self._models.live(), "frontend": self._own}
        if missing:
            health["missing"] = missing
        if degraded:
            health["degraded"] = degraded
        return JSONResponse(health, 503 if missing else 200)

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._models.load()})

    async def _version(self, _: Request) -> Response:
        return JSONResponse(_versions())


@cache
def _versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": installed_vllm().version}
