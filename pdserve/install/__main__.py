"""Installs a checkout's environment: `python -m pdserve.install FOLDER [dev]`, for `make install` and `make dev`.

PLATFORM=cpu|gpu chooses the build (default: gpu where an NVIDIA GPU is found).
"""

import os
import sys
import time
from pathlib import Path

from pdserve.install import engine_venv
from pdserve.install.engine_venv import InstallStep, engine_step, locked
from pdserve.util.errors import Unavailable

ROOT = Path(__file__).parents[2]


def checkout_steps(platform: str, dev: bool) -> list[InstallStep]:
    ours = engine_venv.digest(str(ROOT).encode(), (ROOT / "pyproject.toml").read_bytes())
    itself = InstallStep(ours, ("--no-build-isolation", "--quiet", "--editable", str(ROOT)))
    return [engine_step(platform), itself, *([locked(ROOT / "requirements/dev.txt")] if dev else [])]


def main(folder: Path, dev: bool) -> int:
    platform = os.environ.get("PLATFORM") or engine_venv.find_platform()
    if platform not in engine_venv.PLATFORMS:
        engine_venv.say(f"PLATFORM is cpu or gpu, not {platform!r}")
        return 2
    steps, started = checkout_steps(platform, dev), time.monotonic()
    if all(engine_venv.is_done(folder, step) for step in steps):
        return 0
    try:
        engine_venv.install(folder, steps, platform)
    except Unavailable as error:
        engine_venv.say(str(error))
        return 1
    engine_venv.say(f"installed into {folder} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), "dev" in sys.argv[2:]))
