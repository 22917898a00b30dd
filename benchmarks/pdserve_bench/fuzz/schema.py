"""schemathesis on the graph's own description of its API."""

import asyncio
import re
import sys
from pathlib import Path

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
"""Not the others: vLLM ignores fields that it does not know, and refuses values that no schema can describe."""
_FOUND = re.compile(r"=+ (FAILURES|ERRORS) =+")
_GENERATED = re.compile(r"(\d+) generated")


async def run(url: str, folder: Path, examples: int, seed: int) -> tuple[int, str]:
    """How many requests it sent, and what it found, with a curl command for each; empty where that is nothing.
    `examples` for each operation."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    options = {
        "--checks": CHECKS,
        "--phases": "fuzzing",
        "--max-examples": examples,
        "--seed": seed,
        "--workers": 2,
        "--request-timeout": 60,
        "--generation-database": "none",
        "--suppress-health-check": "all",
        "--warnings": "off",
    }
    words = [str(word) for option in options.items() for word in option]
    process = await asyncio.create_subprocess_exec(
        *command, *words, "--continue-on-failure", "--no-shrink", "--no-color",
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said = (await process.communicate())[0].decode(errors="replace")
    found = _GENERATED.search(said)
    what = _FOUND.search(said)
    return int(found[1]) if found else 0, said[what.start() if what else 0 :] if process.returncode else ""
