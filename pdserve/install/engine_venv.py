"""Installs the locked packages of this machine's engine into a virtual environment, with uv.

Needs only the standard library, because `make install` runs it before pdserve's dependencies are installed. A file in
the environment lists the finished steps. An interrupted step runs again, with wheels from uv's cache.
"""

import ast
import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from pdserve.util.errors import Unavailable
from pdserve.util.tied_child import tied_command

LOCKS = Path(__file__).parent
PLATFORMS = {
    "cpu": "vLLM's CPU build, about 0.7 GB to download, 2.9 GB on disk",
    "gpu": "vLLM's CUDA 13 build for NVIDIA drivers from 580 on, about 9 GB on disk",
    "simulated": "what frontends need of vLLM's CPU build, about 0.5 GB to download, 1.9 GB on disk",
}
ENGINE_VARIABLE = "PDSERVE_ENGINE"
"""Environment variable with the folder of the engine's environment."""
_DONE = ".pdserve-installed"
_NO_SOLUTION = 1
"""uv's exit code if no source has the package. If `--dry-run` fails otherwise, the install reports the cause."""
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_AGAIN = "run it again, and it continues where it stopped"
_EXTRA_INDEXES = "UV_EXTRA_INDEX_URL"


class InstallStep(NamedTuple):
    digest: str
    """of everything that the step installs; if it changes, the step runs again"""
    arguments: tuple[str, ...]
    """of `uv pip install`"""


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def engine_step(platform: str) -> InstallStep:
    return locked(LOCKS / f"{platform}.txt", compiled=platform != "simulated")


def locked(lock: Path, compiled: bool = True) -> InstallStep:
    # Without bytecode, all processes of a graph compile the same thousands of files at the first start, or at every
    # start if PYTHONDONTWRITEBYTECODE is set. With simulated engines, only frontends import vLLM.
    arguments = (f"--requirements={lock}", *["--compile-bytecode"] * compiled)
    return InstallStep(digest(lock.read_bytes()), arguments)


def find_platform() -> str:
    """Return `gpu` if this machine has an NVIDIA GPU, else `cpu`."""
    if Path("/dev/nvidia0").exists():
        return "gpu"
    return "gpu" if _output("nvidia-smi", "-L").startswith("GPU") else "cpu"


def data_folder() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "pdserve"


def engine_folder(platform: str) -> Path:
    """Return PDSERVE_ENGINE, or a folder for this lock file and this Python, which all installations of pdserve share.
    Links in PDSERVE_ENGINE are resolved, because an upgrade may change them while this process still loads files."""
    if given := os.environ.get(ENGINE_VARIABLE):
        return Path(given).expanduser().resolve()
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return data_folder() / f"engine-{platform}-{python}-{engine_step(platform).digest[:12]}"


def find_engine(simulated: bool = False) -> Path | None:
    """Return an installed environment: this machine's platform first, then the other one. If engines are `simulated`,
    the smaller environment for these comes last."""
    others = ("cpu", "gpu", *["simulated"] * simulated)
    for platform in dict.fromkeys((find_platform(), *others)):
        if is_done(folder := engine_folder(platform), engine_step(platform)):
            return folder
    return None


def python_of(folder: Path) -> Path:
    return folder / "bin/python"


def is_done(folder: Path, step: InstallStep) -> bool:
    return python_of(folder).exists() and step.digest in _done(folder)


def install(folder: Path, steps: Sequence[InstallStep], platform: str) -> None:
    """Run the steps that are not done, in order. Raises Unavailable if one fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _install(folder, steps, platform)
    except OSError as error:
        advice = f"set {ENGINE_VARIABLE} to another folder"
        raise Unavailable(f"cannot install into {folder}: {error}: {advice}.") from error


def _install(folder: Path, steps: Sequence[InstallStep], platform: str) -> None:
    with _locked(folder):
        missing = [step for step in steps if not is_done(folder, step)]
        if not missing:
            return
        say(f"installing into {folder}: {PLATFORMS[platform]}")
        _make_environment(folder)
        done = [step.digest for step in steps if step not in missing]
        _write_done(folder, done)
        sources = _sources(folder, uv := _uv_install(folder), platform)
        for step in missing:
            _run([*uv, *step.arguments], sources=sources)
            _write_done(folder, done := [*done, step.digest])


def say(text: str) -> None:
    sys.stderr.write(f"pdserve: {text}\n")


def _done(folder: Path) -> list[str]:
    file = folder / _DONE
    return file.read_text().split() if file.is_file() else []


def _write_done(folder: Path, digests: Iterable[str]) -> None:
    os.sync()  # write the packages to the disk before the file lists them
    (new := folder / f"{_DONE}.new").write_text("\n".join(digests))
    new.replace(folder / _DONE)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process installs into the folder."""
    with (folder / f"{_DONE}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another install into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_environment(folder: Path) -> None:
    if python_of(folder).exists():
        return
    (folder / _DONE).unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])


def _uv_install(folder: Path) -> list[str]:
    """Return the `uv pip install` command. It ignores `uv.toml` of the current folder, perhaps another user's."""
    where = [f"--project={folder}", f"--python={python_of(folder)}"]
    if _pip_options(folder)["no-index"][-1:] not in ([], ["0"], ["false"], ["no"], ["off"]):
        where.append("--no-index")  # uv has no variable for it
    return [_uv(folder), "pip", "install", *where, "--no-deps", "--index-strategy=unsafe-best-match"]


def _uv(folder: Path) -> str:
    """Return uv in the lock's version: this Python's own, or else one that pip installs into the folder."""
    wanted = _locked_version("uv")
    with suppress(PackageNotFoundError):
        if version("uv") == wanted:
            from uv import find_uv_bin

            return str(find_uv_bin())
    uv = folder / "bin/uv"
    if wanted not in _output(uv, "--version").split():
        python = str(python_of(folder))
        if not _output(python, "-m", "pip", "--version"):
            _run([python, "-m", "ensurepip"], "on Debian and Ubuntu: apt install python3-venv")
        _run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", f"uv=={wanted}"])
    return str(uv)


def _sources(folder: Path, uv: Sequence[str], platform: str) -> dict[str, str]:
    """Return environment variables that add pip's package sources to uv's own, and PyTorch's index if no source has
    torch's CPU build. Without indexes (PIP_NO_INDEX), wheel folders are the only sources."""
    sources = pip_settings(folder)
    if platform == "gpu" and "--no-index" not in uv:  # a folder's torch 2.13.0+cpu would satisfy the GPU lock
        sources.pop("UV_FIND_LINKS", None)
    if platform == "gpu" or "--no-index" in uv:
        return sources
    torch = [*uv, "--dry-run", f"torch=={_locked_version('torch')}"]
    if subprocess.run(torch, env=os.environ | sources, capture_output=True).returncode == _NO_SOLUTION:
        say(f"no configured source has torch's CPU build: adding {_TORCH_INDEX}")
        sources[_EXTRA_INDEXES] = f"{(os.environ | sources).get(_EXTRA_INDEXES, '')} {_TORCH_INDEX}"
    return sources


def pip_settings(folder: Path) -> dict[str, str]:
    """Return pip's package sources, which uv does not read, as environment variables of uv that are not set yet. In a
    command line, every user of the host could read a URL's password."""
    found = _pip_options(folder)
    sources = {
        "UV_FIND_LINKS": ",".join(found["find-links"]),
        "UV_INDEX_URL": "".join(found["index-url"][-1:]),
        _EXTRA_INDEXES: " ".join(found["extra-index-url"]),
    }
    return {name: value for name, value in sources.items() if value and name not in os.environ}


def _pip_options(folder: Path) -> defaultdict[str, list[str]]:
    listed, found = _pip_config(folder), defaultdict[str, list[str]](list)
    for section in ("global", "install", ":env:"):  # of index-url, the last one counts
        for name, value in re.findall(rf"^{section}\.([a-z-]+)=(.+)$", listed, re.MULTILINE):
            found[name] += ast.literal_eval(value).split()
    return found


def _pip_config(folder: Path) -> str:
    # An environment made by uv has no pip: then ask the Python from which it was made.
    pythons = (python_of(folder), sys.executable, Path(sys.base_prefix, "bin/python3"))
    return next(filter(None, (_output(python, "-m", "pip", "config", "list") for python in pythons)), "")


def _locked_version(package: str) -> str:
    (found,) = re.findall(rf"^{package}==(\S+)$", (LOCKS / "cpu.txt").read_text(), re.MULTILINE)
    return str(found)


def _output(*command: str | Path) -> str:
    """Return a command's output; empty if it fails or does not exist."""
    with suppress(OSError):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if ran.returncode else ran.stdout
    return ""


def _run(command: Sequence[str], advice: str = _AGAIN, sources: Mapping[str, str] | None = None) -> None:
    """Run a command. Its progress is shown on a terminal; elsewhere its lines about single packages are left out."""
    pipe = None if sys.stderr.isatty() else subprocess.PIPE
    env, quiet = {**os.environ, **(sources or {})}, subprocess.DEVNULL
    with subprocess.Popen(tied_command(command), env=env, stdout=quiet, stderr=pipe, text=True) as process:
        for line in process.stderr or ():
            if not re.match(r" [+~-] ", line):
                sys.stderr.write(line)
    if process.returncode:
        raise Unavailable(f"the install failed for the reason above: {advice}.")
