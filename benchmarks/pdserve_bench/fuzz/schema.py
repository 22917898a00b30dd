"""schemathesis on the graph's own description of its API: it makes valid requests for each route, and mutates them."""

import asyncio
import re
import sys
from pathlib import Path

from pdserve_bench.fuzz.responses import EXCUSED

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
"""Not the others: vLLM ignores fields that it does not know, and refuses values that no schema can describe."""
OPERATIONS = 20
"""of the description, about"""
_FAILURES = re.compile(r"=+ (FAILURES|ERRORS) =+")
_GENERATED = re.compile(r"(\d+) generated")


async def run(url: str, folder: Path, requests: int, seed: int) -> tuple[int, str]:
    """Send about so many requests. Returns their number, and the failures with a curl command for each; empty where
    there are none."""
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
    """What schemathesis says of its failures; empty where each of them is excused."""
    excused = sum(output.count(excuse) for excuse in EXCUSED)
    if 0 < output.count("\n- ST") <= excused:
        return ""
    found = _FAILURES.search(output)
    return output[found.start() if found else 0 :]
