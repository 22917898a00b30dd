"""Run schemathesis on the graph's OpenAPI description: it generates valid requests per route and mutates them."""

import asyncio
import re
import sys
from pathlib import Path

from pdserve_bench.fuzz.responses import EXCUSED

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
"""Other checks do not fit: vLLM ignores unknown fields and refuses values that a schema cannot describe."""
OPERATIONS = 20
"""Approximate number of operations in the description."""
_FAILURES = re.compile(r"=+ (FAILURES|ERRORS) =+")
_GENERATED = re.compile(r"(\d+) generated")


async def run(url: str, folder: Path, requests: int, seed: int) -> tuple[int, str]:
    """Send about `requests` requests. Return how many were sent, and failures with curl commands."""
    options = {
        "--checks": CHECKS,
        "--phases": "fuzzing",
        "--max-examples": max(1, requests // OPERATIONS),
        "--seed": seed,
        "--workers": 2,
        "--request-timeout": 60,
        "--generation-database": "none",
        "--suppress-health-check": "all",
        "--warnings": "off",
    }
    words = [str(word) for option in options.items() for word in option]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json",
        *words, "--continue-on-failure", "--no-shrink", "--no-color",
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode(errors="replace")
    sent = _GENERATED.search(output)
    return int(sent[1]) if sent else 0, failures(output) if process.returncode else ""


def failures(output: str) -> str:
    """Return schemathesis' failures; empty if all are excused."""
    excused = sum(output.count(excuse) for excuse in EXCUSED)
    if 0 < output.count("\n- ST") <= excused:
        return ""
    found = _FAILURES.search(output)
    return output[found.start() if found else 0 :]
