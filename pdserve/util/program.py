"""The command by which the user runs pdserve, for output that suggests one: it works as typed."""

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

PROGRAM_VARIABLE = "PDSERVE_PROGRAM"
"""environment variable with the program that the user ran, where it went on in another environment"""


def pdserve_command(text: str) -> str:
    """`pdserve TEXT`, with the path of this installation's program where the shell would not find it."""
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
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
