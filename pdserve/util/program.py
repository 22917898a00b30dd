"""The command line that runs pdserve on this machine, for messages that suggest a command."""

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

PROGRAM_VARIABLE = "PDSERVE_PROGRAM"
"""Environment variable with the program that the user ran, set before pdserve re-executes in another venv."""


def pdserve_command(text: str) -> str:
    """Return `pdserve TEXT`, with the program's path if the shell would not find it."""
    return f"{program_path()} {text}"


@cache
def program_path() -> str:
    if given := os.environ.get(PROGRAM_VARIABLE):
        return given
    script = Path(sys.executable).parent / "pdserve"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -P -m pdserve"
    if (known := shutil.which("pdserve")) and Path(known).resolve() == script.resolve():
        return "pdserve"
    folder = Path.cwd()
    return shlex.quote(str(script.relative_to(folder) if script.is_relative_to(folder) else script))
