"""`pdserve bench ...` as a user runs it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Self

from pdserve_bench.launch import PDSERVE


class Bench:
    """One run, its output apart. Killed where it is left before its end."""

    process: asyncio.subprocess.Process

    def __init__(self, *arguments: object, folder: Path | None = None) -> None:
        self._words, self._folder = list(map(str, arguments)), folder

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *PDSERVE,
            "bench",
            *self._words,
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENAI_API_KEY": "k"},
        )
        return self

    async def ended(self, within: float = 60) -> tuple[int | None, str, str]:
        """Exit code, stdout, stderr."""
        out, err = await asyncio.wait_for(self.process.communicate(), within)
        return self.process.returncode, out.decode(), err.decode()

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
