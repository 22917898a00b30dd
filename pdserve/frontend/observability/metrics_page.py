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
"""seconds for the pages of all other processes: what does not answer is left out"""
KEPT = 1.0
"""seconds for which a page is given again: many scrapers must not multiply the work in every process"""
MAX_MERGED = 100
"""other processes whose pages are merged into one: with more, reading and parsing them would take a frontend seconds,
and each has its own page (`Instance.metrics`) for a scraper that finds them all"""


class MetricsPage(Plugin):
    """Of this process and of every other one that the registry has, with hosts and the use of each key: from elsewhere
    it needs a key that may see everything."""

    local_paths = frozenset({"/metrics"})

    def __init__(self, context: PluginContext) -> None:
        self._view, self._own, self._client = context.view, context.id, context.http
        self._keys, self._models = context.keys, context.models
        self.routes = [Route("/metrics", self._answer)]
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
        """Supervisors have no page of their own: what they know is in the registry."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SlotMetrics(self._view.slots()))
        return generate_latest(registry).decode()

    async def _fetch(self, instance: Instance, page: MergedPage) -> bool:
        """A process that does not answer is left out. Its page is merged when it comes and in the event loop, where a
        page takes a fraction of a millisecond; a thread for all of them would hold the GIL for several at a time."""
        try:
            async with asyncio.timeout(FETCH_WITHIN):
                answer = await self._client.get(instance.metrics)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return False
        if answer.status_code == 200:
            page.add(instance.id, answer.text)
        return answer.status_code == 200
