"""Rooms that need no vLLM pass their tests on Python 3.12 and 3.13, with the lowest and the newest versions of
pdserve's own dependencies. `.github/workflows/ci.yml` runs all tests on each Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
ROOMS = ("config", "contract", "prefill", "runtime", "security", "stream", "util")
MODULES = ("registry/test_contract.py", "queue/test_contract.py")


def interpreter(version: str) -> str:
    """The path of a Python of this version that is installed here; skips the test if there is none."""
    listed = subprocess.run(
        [UV, "python", "list", "--only-installed", "--no-python-downloads", "--offline"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}")
    found = [*re.findall(rf"^cpython-{re.escape(version)}\.\S+\s+(/\S+)", listed, re.M), *map(str, pyenv)]
    for path in found:
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    pytest.skip(f"no Python {version} is installed here")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("version", "resolution"), [("3.12", "lowest-direct"), ("3.13", "highest"), ("3.13", "lowest-direct")]
)
def test_rooms_without_vllm_pass_on_other_pythons(tmp_path: Path, version: str, resolution: str) -> None:
    python = str(tmp_path / "env/bin/python")
    pins = re.findall(rf"^(?:{'|'.join(TOOLS)})==\S+", (ROOT / "requirements/dev.txt").read_text(), re.M)
    subprocess.run([UV, "venv", "--quiet", "--python", interpreter(version), tmp_path / "env"], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", python, "--only-binary=:all:"]
    subprocess.run(
        [*install, f"--resolution={resolution}", "--requirements=pyproject.toml"], cwd=ROOT, check=True
    )
    subprocess.run([*install, *pins], check=True)
    chosen = (
        (*ROOMS, *MODULES) if (version, resolution) == ("3.13", "lowest-direct") else ("contract", "config")
    )
    tests = [f"tests/{name}" for name in chosen]
    ran = subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            f"--basetemp={tmp_path / 't'}",
            *tests,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
