"""Whether the frontends of this machine serve what they should, asked as a client would."""

import asyncio
from collections.abc import AsyncIterator

import httpx

INTERVAL = 0.25


async def until_healthy(url: str, processes: int) -> AsyncIterator[str]:
    """Yields what is missing, in the frontend's words, until nothing is.

    The frontends share one port, and who answers is chance: as many answers in a row as there are processes
    have to be good.
    """
    good = 0
    async with httpx.AsyncClient(headers={"connection": "close"}, timeout=5) as client:
        while good < processes:
            missing = await _missing(client, url)
            good = 0 if missing else good + 1
            if missing:
                yield missing
                await asyncio.sleep(INTERVAL)


async def _missing(client: httpx.AsyncClient, url: str) -> str:
    try:
        answer = await client.get(f"{url}/health")
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    if answer.status_code == 200:
        return ""
    try:
        return str(answer.json()["missing"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {answer.status_code}"
