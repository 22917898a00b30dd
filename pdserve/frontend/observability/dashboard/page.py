"""`/dashboard`: static files of this folder, open to all, and the state, which the page polls each second.

Scripts and styles come only from this folder. All data is shown as text."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.contract.records import encode_record
from pdserve.contract.reports import TICK, LinkState, Receipt
from pdserve.frontend.keys.auth import Viewer
from pdserve.frontend.plugins import Plugin, PluginContext
from pdserve.observe.graph_state import (
    GraphState,
    Moment,
    decode_workers,
    graph_state,
    promise_kept,
    settings_changed,
)
from pdserve.observe.problems import Node, Problem, nodes, problems
from pdserve.observe.process_pages import read_watched
from pdserve.util import clock

KEPT = 1.0
"""Seconds that the state is cached for all viewers."""
PER_SECOND = 50
"""Maximum of processes polled per second. The state of a larger graph is cached for longer."""
MAX_LINKS = 400
"""Maximum of links in a state. If there are more, each process shows at most an equal share, links that are down
first."""

_PAGE, _STATE = "/dashboard", "/dashboard/state"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = sorted(file for file in Path(__file__).parent.iterdir() if file.suffix in _KINDS)
SHELL = {_PAGE if file.name == "index.html" else f"{_PAGE}/{file.name}": file for file in _FILES}
"""Files by path. They need no API key, because the page asks for one."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class DashboardState(Struct, frozen=True):
    """What the page shows."""

    frontend: str
    """Instance id of the responding frontend."""
    key: str
    everything: bool
    models: list[str]
    settings: list[str]
    """Live settings that differ from the file, one line each."""
    promise: str
    """How many requests kept their promise; empty if none had one."""
    queue_depth: int
    queue_limit: int
    nodes: list[Node]
    problems: list[Problem]
    moments: list[Moment]
    receipts: list[Receipt]
    tick: float = TICK


class Dashboard(Plugin):
    open_paths = frozenset(SHELL)

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._reading = asyncio.Lock()
        self._state: GraphState
        self._answers: dict[Viewer, bytes] = {}
        self._until = 0.0
        """Monotonic time until which `_state` is cached."""
        self.routes = [
            *(Route(path, _shell(file)) for path, file in SHELL.items()),
            Route(_STATE, self._answer),
        ]

    async def _answer(self, request: Request) -> Response:
        state = await self.state(self._context.keys.viewer(request.headers))
        return Response(state, media_type="application/json", headers={"cache-control": "no-store"})

    async def state(self, viewer: Viewer) -> bytes:
        async with self._reading:
            if time.monotonic() >= self._until:
                self._state = await self._read()
                self._until = time.monotonic() + max(KEPT, len(self._state.instances) / PER_SECOND)
                self._answers = {}
            if viewer not in self._answers:
                self._answers[viewer] = encode_record(
                    shown_to(self._state, viewer, self._context.id, clock.unix(), self._context.model)
                )
            return self._answers[viewer]

    async def _read(self) -> GraphState:
        view, own = self._context.view, self._context.id
        others = [other for other in view.instances() if other.id != own]
        watched = await read_watched(others, self._context.http)
        watched[own] = self._context.report()
        return graph_state(*view.snapshot(), watched)


def shown_to(state: GraphState, viewer: Viewer, own: str, now: float, model: str) -> DashboardState:
    """Return the part of the state that the viewer may see. Pure. `now`: Unix seconds. `model`: the frontend's model,
    which is shown even without a worker."""
    if not viewer.everything:
        state = _public(state, viewer.key)
    processes = nodes(state, now)
    if not viewer.everything:
        processes = [_placeless(node) for node in processes]
    most = max(1, MAX_LINKS // max(1, len(processes)))
    wrong = problems(state, processes)
    if sum(len(node.links) for node in processes) > MAX_LINKS:
        processes = [replace(node, links=_notable(node)[:most]) for node in processes]
    return DashboardState(
        frontend=own,
        key=viewer.key,
        everything=viewer.everything,
        models=sorted({model, *decode_workers(state)}),
        settings=settings_changed(state),
        promise=promise_kept(state.moments),
        queue_depth=state.queue_depth,
        queue_limit=state.queue_limit,
        nodes=processes,
        problems=wrong,
        moments=state.moments,
        receipts=state.receipts,
    )


def _public(state: GraphState, key: str) -> GraphState:
    """Keep only this key's receipts, and remove causes, addresses and hosts."""
    return replace(
        state,
        receipts=[receipt for receipt in state.receipts if receipt.key == key],
        slots=[replace(slot, cause="") for slot in state.slots],
        outages={
            name: [replace(outage, address="") for outage in outages]
            for name, outages in state.outages.items()
        },
        gone=[replace(each, host="") for each in state.gone],
    )


def _placeless(node: Node) -> Node:
    """Remove host, pid, addresses, GPUs and links' errors, which may name addresses."""
    instance = node.instance and replace(node.instance, address="", metrics="", host="", pid=0, gpus=[])
    return replace(node, host="", instance=instance, links=[replace(link, failure="") for link in node.links])


def _notable(node: Node) -> list[LinkState]:
    return sorted(node.links, key=lambda link: (link.up, -link.failures, -link.requests))


def _shell(file: Path) -> Callable[[Request], Awaitable[Response]]:
    body, kind = file.read_bytes(), _KINDS[file.suffix]

    async def shell(_: Request) -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return shell
