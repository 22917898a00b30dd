"""`pdserve install`, and how other commands switch to the engine's environment."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from pdserve.config.engine_args.installed import SIMULATED_VARIABLE, installed_vllm, is_simulated
from pdserve.install import engine_venv
from pdserve.install.engine_venv import PLATFORMS
from pdserve.util.errors import ConfigError
from pdserve.util.program import PROGRAM_VARIABLE, pdserve_command, program_path

Gpu = Annotated[
    bool | None,
    typer.Option("--gpu/--cpu", help="for GPUs or for the CPU (default: GPUs if this machine has some)"),
]


def install(
    gpu: Gpu = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="only what frontends of simulated engines need")
    ] = False,
) -> int:
    """Install the engine, vLLM with its dependencies in the versions that this pdserve needs, into an environment of
    its own (PDSERVE_ENGINE, default: a folder in ~/.local/share/pdserve). Commands that need the engine run in it. An
    interrupted install continues where it stopped. Settings of pip and uv apply, such as indexes and caches.
    Engines of other pdserve versions stay in folders beside it; remove them when none of their graphs runs.

    examples:
      pdserve install              for this machine's GPUs, or its CPU
      pdserve install --cpu
      pdserve install --simulated  for `serve --simulated` only: smaller, without GPUs
    """
    platform = _platform(simulated) if gpu is None else "gpu" if gpu else "cpu"
    print(f"The engine is installed in {ensure_engine(platform)}.")
    return 0


def ensure_engine(platform: str) -> Path:
    """Install the engine if it is not installed; return its environment."""
    folder = engine_venv.engine_folder(platform)
    engine_venv.install(folder, [engine_venv.engine_step(platform)], platform)
    return folder


def _platform(simulated: bool) -> str:
    return "simulated" if simulated else engine_venv.find_platform()


def simulate() -> None:
    """Simulate all engines of this process's graph, also in the processes that it starts."""
    os.environ[SIMULATED_VARIABLE] = "1"


def use_engine() -> None:
    """If another environment has the engine and this one does not, run the command there and do not return."""
    if not installed_vllm().package and (folder := engine_venv.find_engine(is_simulated())):
        _run_in(folder)


def need_engine(yes: bool = False) -> None:
    """Run the command in the engine's environment. Install a missing engine if `yes`, or if the user at the terminal
    agrees. Raises ConfigError otherwise."""
    use_engine()  # again, because an option may have changed which engine is needed
    if installed_vllm().package:
        return
    platform = _platform(is_simulated())
    folder = engine_venv.engine_folder(platform)
    what = f"{PLATFORMS[platform]}, into {folder}"
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        yes = typer.confirm(f"pdserve: no engine is installed. Install {what}?", default=True, err=True)
    if not yes:
        raise ConfigError([f"no engine is installed: run `{pdserve_command('install')}` ({what})."])
    _run_in(ensure_engine(platform))


def _run_in(folder: Path) -> None:
    """Replace this process by the same command with the environment's Python and this installation's pdserve."""
    os.environ[PROGRAM_VARIABLE] = program_path()
    paths = [str(code_folder()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.stdout.flush()
    python = str(engine_venv.python_of(folder))
    os.execv(python, [python, "-m", "pdserve", *sys.argv[1:]])


def code_folder() -> Path:
    """Make a folder with links to this installation's pdserve, without the packages installed beside it."""
    beside = Path(__file__).resolve().parents[3]
    folder = engine_venv.data_folder() / f"code-{engine_venv.digest(str(beside).encode())[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("pdserve", "pdserve_bench"):
            with suppress(FileExistsError):  # another command may create it at the same time
                (folder / name).symlink_to(beside / name)
    except OSError as error:
        raise ConfigError([f"cannot use {folder}: {error}. Set XDG_DATA_HOME to another folder."]) from error
    return folder
