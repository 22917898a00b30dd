"""`pdserve install`, and the way of other commands into the engine's environment."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from pdserve.config.engine_args.installed import installed_vllm
from pdserve.install import engine_venv
from pdserve.install.engine_venv import PLATFORMS
from pdserve.util.errors import ConfigError
from pdserve.util.program import PROGRAM_VARIABLE, pdserve_command, program_path

Gpu = Annotated[
    bool | None, typer.Option("--gpu/--cpu", help="for GPUs or without (default: as this machine has them)")
]


def install(gpu: Gpu = None) -> int:
    """Install the engine, vLLM with all that it needs, in the versions that this pdserve is made for, into an
    environment of its own (PDSERVE_ENGINE, default: a folder in ~/.local/share/pdserve). Commands that need it go on
    there. An install that was interrupted goes on where it stopped. pip's and uv's settings hold: indexes, caches.
    Engines of other versions of pdserve stay in folders beside it; remove them when none of their graphs runs.

    examples:
      pdserve install              for this machine's GPUs, or its CPU
      pdserve install --cpu
    """
    platform = engine_venv.find_platform() if gpu is None else "gpu" if gpu else "cpu"
    print(f"{installed(platform)} has the engine.")
    return 0


def installed(platform: str) -> Path:
    """The environment, in which the engine is installed if it was not."""
    folder = engine_venv.engine_folder(platform)
    engine_venv.install(folder, [engine_venv.engine_step(platform)], platform)
    return folder


def use_engine() -> None:
    """Where this environment has no engine and another one has it, go on there: this does not return then."""
    if not installed_vllm().package and (folder := engine_venv.find_engine()):
        _go_on_in(folder)


def need_engine(yes: bool = False) -> None:
    """Offer to install the engine where there is none, and go on there. Raises ConfigError where it is declined."""
    if installed_vllm().package:
        return
    platform = engine_venv.find_platform()
    folder = engine_venv.engine_folder(platform)
    what = f"{PLATFORMS[platform]}, into {folder}"
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        yes = typer.confirm(f"pdserve: no engine is installed. Install {what}?", default=True, err=True)
    if not yes:
        raise ConfigError([f"no engine is installed: run `{pdserve_command('install')}` ({what})."])
    _go_on_in(installed(platform))


def _go_on_in(folder: Path) -> None:
    """Run this command with the environment's Python and this installation's pdserve."""
    os.environ[PROGRAM_VARIABLE] = program_path()
    paths = [str(code_folder()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.stdout.flush()
    python = str(engine_venv.python_of(folder))
    os.execv(python, [python, "-m", "pdserve", *sys.argv[1:]])


def code_folder() -> Path:
    """A folder with links to this installation's pdserve and to nothing of what is installed beside it."""
    beside = Path(__file__).parents[3]
    folder = engine_venv.data_folder() / f"code-{engine_venv.digest(str(beside).encode())[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("pdserve", "pdserve_bench"):
            with suppress(FileExistsError):  # also where another command makes them now
                (folder / name).symlink_to(beside / name)
    except OSError as error:
        raise ConfigError([f"cannot use {folder}: {error}. XDG_DATA_HOME names another place."]) from error
    return folder
