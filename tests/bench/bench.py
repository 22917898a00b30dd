"""Run `pdserve bench ...` as a user does."""

import asyncio
import os
import sys
from pathlib import Path

from pdserve_bench.graphs.launch import PDSERVE


async def bench(words: str, folder: Path, within: float = 60) -> tuple[int | None, str, str]:
    """Run `pdserve bench WORDS` in `folder`; return exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(*PDSERVE, "bench", *words.split()),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENAI_API_KEY": "k"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), within)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode, out.decode(), err.decode()
