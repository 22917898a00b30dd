"""The pages `/health` and `/ping` (for probes and `pdserve serve`), `/load` and `/version`."""

import time
from functools import cache

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import pdserve
from pdserve.config.engine_args.installed import installed_vllm
from pdserve.contract.reports import Outage, ProcessReport
from pdserve.frontend.keys.auth import is_local
from pdserve.frontend.plugins import Plugin, PluginContext
from pdserve.observe.graph_state import graph_state
from pdserve.observe.problems import nodes, problems

KEPT = 1.0
"""Seconds for which the problems are cached, because anyone may ask and finding them takes milliseconds."""


class HealthPages(Plugin):
    open_paths = frozenset({"/health", "/ping"})
    """A remote probe without a key gets only the status."""
    local_paths = frozenset({"/load", "/version"})

    def __init__(self, context: PluginContext) -> None:
        self._own, self._models = context.id, context.models
        self._keys, self._view, self._context = context.keys, context.view, context
        self._problems: list[str] = []
        self._until = 0.0
        """Monotonic time until which `_problems` is cached."""
        self.routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
        ]

    async def _health(self, request: Request) -> Response:
        missing = self._models.why_unserved()
        degraded = {f"{slot.name}@{slot.host}": str(slot) for slot in self._view.slots() if not slot.ready}
        if time.monotonic() >= self._until:
            self._problems, self._until = known_problems(self._context), time.monotonic() + KEPT
        wrong = self._problems
        status = "unavailable" if missing else "degraded" if degraded or wrong else "ok"
        health: dict[str, object] = {"status": status}
        if not is_local(request.scope) and not self._keys.knows(request.headers):
            return JSONResponse(health, 503 if missing else 200)
        health |= {"workers": self._models.usable_workers(), "frontend": self._own}
        if missing:
            health["missing"] = missing
        if self._models.refuses():
            health["refused"] = True  # `serve` reads this and ends
        if degraded:
            health["degraded"] = degraded
        if wrong:
            health["problems"] = wrong
        return JSONResponse(health, 503 if missing else 200)

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._models.load()})

    async def _version(self, _: Request) -> Response:
        return JSONResponse(_versions())


def known_problems(context: PluginContext) -> list[str]:
    """List the graph's problems, without addresses and causes, which are not public. It asks no other process, because
    a probe must not wait."""
    view = context.view
    lost = ProcessReport(outages=[Outage("NATS", "", 0.0)])
    others = {each.id: lost if each.queue_lost else ProcessReport() for each in view.instances()}
    outages = [replace(outage, address="") for outage in context.outages()]
    links = [replace(link, failure="", round_trip=None) for link in context.models.links()]
    others[context.id] = ProcessReport(links=links, outages=outages, gone=view.lost_processes())
    slots = [replace(slot, cause="", since=0.0) for slot in view.slots()]
    state = graph_state(view.instances(), slots, view.cards(), {}, others)
    return [each.text for each in problems(state, nodes(state, 0.0)) if each.level != "info"]


@cache
def _versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": installed_vllm().version}
