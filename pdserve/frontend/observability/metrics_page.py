"""`/metrics`: the metrics of the whole graph on one page."""

import asyncio
import time

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.contract.records import Instance
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.keys.auth import is_local
from pdserve.frontend.plugins import Plugin, PluginContext
from pdserve.observe.metrics import MergedPage, SlotMetrics

FETCH_WITHIN = 0.5
"""Seconds to wait for the page of another process; `/metrics` omits processes that do not respond."""
KEPT = 1.0
"""Seconds that the page is cached, because many scrapers must not multiply the work of every process."""
MAX_MERGED = 100
"""With more other processes than this, none of their pages is merged, because that would take seconds. Scrape each
process instead (`Instance.metrics`)."""


class MetricsPage(Plugin):
    """`/metrics`: the merged metrics of all registered processes. If keys are configured, a remote reader needs an
    admin key, because the page shows hosts and the use of each key."""

    local_paths = frozenset({"/metrics"})

    def __init__(self, context: PluginContext) -> None:
        self._view, self._own, self._client = context.view, context.id, context.http
        self._keys, self._models = context.keys, context.models
        self.routes = [Route("/metrics", self._answer)]
        self._making = asyncio.Lock()
        self._page = b""
        self._made = float("-inf")
        """Monotonic time of `_page`."""

    async def get(self) -> bytes:
        async with self._making:
            if time.monotonic() - self._made > KEPT:
                self._page = await self._make()
                self._made = time.monotonic()
            return self._page

    async def _answer(self, request: Request) -> Response:
        if not is_local(request.scope) and not self._keys.viewer(request.headers).everything:
            raise HttpError(403, "the metrics show all keys and hosts: they need a key with `admin: true`")
        return Response(await self.get(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _make(self) -> bytes:
        page = MergedPage()
        others = [other for other in self._view.instances() if other.metrics and other.id != self._own]
        if len(others) <= MAX_MERGED:
            found = await asyncio.gather(*(self._fetch(other, page) for other in others))
            self._models.show_ready({other.id for other, well in zip(others, found, strict=True) if not well})
        page.add(self._own, generate_latest().decode())
        page.add("serve", self._slots())
        return page.text()

    def _slots(self) -> str:
        """Metrics of supervisors, from the registry, because supervisors have no page."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SlotMetrics(self._view.slots()))
        return generate_latest(registry).decode()

    async def _fetch(self, instance: Instance, page: MergedPage) -> bool:
        """Merge the page of a process; return whether it responded. A page takes under a millisecond, so it is merged
        in the event loop."""
        try:
            async with asyncio.timeout(FETCH_WITHIN):
                answer = await self._client.get(instance.metrics)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return False
        if answer.status_code == 200:
            page.add(instance.id, answer.text)
        return answer.status_code == 200
