"""`/health`, for probes and for `pdserve serve`, and the pages beside it that say what runs here."""

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
"""seconds for which problems are given again: of hundreds of processes they take milliseconds, and anyone may ask"""


class HealthPages(Plugin):
    open_paths = frozenset({"/health", "/ping"})
    """a probe from elsewhere, without a key, gets the status alone"""
    local_paths = frozenset({"/load", "/version"})

    def __init__(self, context: PluginContext) -> None:
        self._own, self._models = context.id, context.models
        self._keys, self._view, self._context = context.keys, context.view, context
        self._problems: list[str] = []
        self._until = 0.0
        """monotonic, when these are to be looked for again"""
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
    """What is wrong with the graph by the registry and by this process's connections alone, since a probe must not wait
    for other processes; without addresses and causes, which should not be public."""
    view = context.view
    lost = ProcessReport(outages=[Outage("NATS", "", 0.0)])
    others = {each.id: lost if each.queue_lost else ProcessReport() for each in view.instances()}
    outages = [replace(outage, address="") for outage in context.outages()]
    links = [replace(link, failure="", round_trip=None) for link in context.models.links()]
    others[context.id] = ProcessReport(links=links, outages=outages, gone=view.lost_workers())
    slots = [replace(slot, cause="", since=0.0) for slot in view.slots()]
    state = graph_state(view.instances(), slots, view.cards(), {}, others)
    return [each.text for each in problems(state, nodes(state, 0.0)) if each.level != "info"]


@cache
def _versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": installed_vllm().version}
