"""The graph's metrics on one page: those of this process and of every other one that the registry knows."""

import asyncio
import time

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.messages import Instance
from pdserve.observe.metrics import SlotMetrics, merge
from pdserve.registry.view import View

PATIENCE = 0.5
"""seconds for the pages of the others, all at once: what does not answer is left out"""
KEPT = 1.0
"""seconds for which a page is given again: many scrapers must not multiply the work in every process"""


class MetricsPage:
    """`own` is this process's instance id."""

    def __init__(self, view: View, own: str, client: httpx.AsyncClient) -> None:
        self._view = view
        self._own = own
        self._client = client
        self._making = asyncio.Lock()
        self._page = b""
        self._made = float("-inf")
        """monotonic"""

    async def __call__(self) -> bytes:
        async with self._making:
            if time.monotonic() - self._made > KEPT:
                self._page = await self._make()
                self._made = time.monotonic()
            return self._page

    async def _make(self) -> bytes:
        others = [one for one in self._view.instances() if one.metrics and one.id != self._own]
        texts = await asyncio.gather(*(self._fetch(one) for one in others))
        pages = {one.id: text for one, text in zip(others, texts, strict=True) if text}
        pages[self._own] = generate_latest().decode()
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
            async with asyncio.timeout(PATIENCE):
                answer = await self._client.get(instance.metrics)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return ""
        return answer.text if answer.status_code == 200 else ""
