"""The command line: what is printed, and the exit codes. Mostly in this process: to start one takes half a second."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509

from pdserve.cli import COMMANDS, main
from pdserve.credentials import Credentials
from pdserve.errors import ConfigError, EngineDead, RegistryUnavailable
from pdserve.process import life
from pdserve.registry import etcd

LOCAL = Path(__file__).parent.parent / "configs/local.yaml"
ALL = [
    f"{group} {name}".strip()
    for group, commands in [("", COMMANDS), ("bench", COMMANDS["bench"][0])]
    for name in commands
    if name != "bench"
]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def pdserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command, whatever the environment of the tests says to it."""
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSERVE_STATE_DIR", str(tmp_path / "state"))

    def run(*args: object) -> Done:
        capsys.readouterr()
        return Done(main(list(map(str, args))), *capsys.readouterr())

    return run


def process(*args: object, state: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """For commands that become a process of a graph: they change logging and signals."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    env["PDSERVE_STATE_DIR"] = str(state)
    command = [sys.executable, "-m", "pdserve", *map(str, args)]
    return subprocess.run(
        command, env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def python(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_help_lists_every_command(pdserve: Run) -> None:
    result = pdserve("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", ALL)
def test_every_command_teaches_by_example(pdserve: Run, command: str) -> None:
    result = pdserve(*command.split(), "--help")
    assert result.returncode == 0
    assert f"examples:\n  pdserve {command}" in result.stdout


def test_help_and_plan_load_nothing_heavy() -> None:
    script = (
        "import sys; from pdserve.cli import main\n"
        "main(['--help'])\n"
        "own = ('pdserve.cli.', 'pdserve_bench', 'rich')\n"
        "found = [name for name in sys.modules if name.startswith(own)]\n"
        "for command in ('serve', 'plan', 'frontend', 'decode', 'prefill'):\n"
        "    main([command, '--help'])\n"
        "found += {'yaml', 'psutil', 'prometheus_client', 'rich', 'asyncio'} & set(sys.modules)\n"
        f"main(['plan', '-f', {str(LOCAL)!r}])\n"
        "found += {'vllm', 'torch', 'transformers', 'nats', 'aetcd', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(' '.join(found))"
    )
    assert python(script).stderr == "\n"


def test_a_role_can_be_stopped_before_it_imports_anything_big() -> None:
    """Its imports take a third of a second; in it, too, SIGTERM is answered with exit code 0."""
    script = (
        "import signal, sys\n"
        "def handle(number, handler):\n"
        "    sys.exit(str({'yaml', 'psutil', 'uvloop', 'asyncio'} & set(sys.modules) or ''))\n"
        "signal.signal = handle\n"
        "from pdserve.cli import main\n"
        "main(['decode', '-f', 'graph.yaml'])"
    )
    result = python(script)
    assert (result.returncode, result.stderr) == (1, "\n")


def test_without_its_package_chaos_says_how_to_get_it() -> None:
    script = (
        "import sys; from pdserve.cli import main\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pdserve_bench':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "sys.exit(main(['chaos', '--list']))"
    )
    result = python(script)
    assert result.returncode == 1
    assert "pdserve: pdserve chaos needs pdserve_bench: run `pdserve install`" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "Usage: pdserve"),
        (["serv"], "pdserve: No such command 'serv'. Did you mean 'serve'?"),
        (["decode"], "pdserve: Missing option '-f' / '--file'."),
        (["plan", "--fil", "x"], "pdserve: No such option: --fil (Possible options: --file)"),
        (["decode", "-f", "x", "--index", "first"], "pdserve: Invalid value for '--index'"),
        (["serve", "-f", "x", "--log-format", "xml"], "pdserve: Invalid value for '--log-format'"),
        (["chaos", "-f", "x", "--workers", "0"], "pdserve: Invalid value for '--workers'"),
        (["plan", "-f", "/no/such.yaml"], "/no/such.yaml"),
        (["set", "max-local-prefil-length=5"], "did you mean max-local-prefill-length?"),
        (["set", "max-local-prefill-length=many"], "whole number"),
        (["set", "max-prefill-queue-size=2147483648"], "from 0 to 2147483647"),
        (["set", "max-prefill-queue-size=" + "9" * 5000], "from 0 to 2147483647"),
        (["set", "max-prefill-queue-size=\uff15"], "from 0 to 2147483647"),
        (["set", "max-prefill-queue-size=5\n"], "'5\\n': it takes"),
        (["set", "router=random"], "round-robin"),
        (["set", "router"], "not KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_exit_code_2(
    pdserve: Run, args: list[str], complaint: str
) -> None:
    result = pdserve(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_version(pdserve: Run) -> None:
    assert pdserve("--version").stdout.startswith("pdserve ")


def test_a_plan_is_a_table_or_json(pdserve: Run) -> None:
    result = pdserve("plan", "-f", LOCAL)
    assert (result.returncode, result.stderr) == (0, "")
    assert "decode-0" in result.stdout
    plan = json.loads(pdserve("plan", "-f", LOCAL, "--json").stdout)
    assert plan["fits"] is True
    assert [worker["name"] for worker in plan["workers"]] == ["decode-0", "prefill-0"]


@pytest.fixture
def too_big(tmp_path: Path) -> Path:
    path = tmp_path / "big.yaml"
    path.write_text("VllmWorker: {model: /not/there, ServiceArgs: {workers: 2}}\n")
    return path


def test_plan_that_does_not_fit_says_why(pdserve: Run, too_big: Path) -> None:
    result = pdserve("plan", "-f", too_big)
    assert result.returncode == 2
    assert "model folder /not/there not found" in " ".join(result.stdout.split())


def test_plan_cannot_say_what_it_does_not_know(pdserve: Run, tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text("VllmWorker: {model: nobody/nothing-of-the-kind}\n")
    result = pdserve("plan", "-f", tmp_path / "hub.yaml")
    assert result.returncode == 3
    assert "Cannot say whether it fits" in result.stdout
    assert json.loads(pdserve("plan", "-f", tmp_path / "hub.yaml", "--json").stdout)["fits"] is None


def test_output_suggests_commands_that_work_as_typed(tmp_path: Path) -> None:
    """As after `make install`, which puts nothing on PATH."""
    bare = {name: value for name, value in os.environ.items() if name != "PATH"}
    paths = os.pathsep.join([str(LOCAL.parents[1]), sysconfig.get_path("purelib")])
    bare |= {"PYTHONPATH": paths, "PDSERVE_STATE_DIR": str(tmp_path / "state")}
    (elsewhere := tmp_path / "python").symlink_to(sys.executable)  # with no pdserve beside it

    def suggested(python: Path, path: str, cwd: Path) -> str:
        env = bare | {"PATH": path}
        done = subprocess.run(
            [python, "-m", "pdserve", "status"], env=env, cwd=cwd, capture_output=True, text=True, check=False
        )
        (found,) = re.findall(r"start one with `(.*) serve -f FILE`", done.stderr)
        again = subprocess.run(
            f"{found} --version", shell=True, env=env, cwd=cwd, capture_output=True, check=True
        )
        assert again.stdout.startswith(b"pdserve ")
        return str(found)

    python, usual = Path(sys.executable), "/usr/bin:/bin"
    folder = python.parent
    assert suggested(python, f"{folder}:{usual}", tmp_path) == "pdserve"
    assert suggested(python, usual, tmp_path) == f"{folder}/pdserve"
    assert suggested(python, usual, folder.parent) == f"{folder.name}/pdserve"
    assert suggested(elsewhere, usual, tmp_path) == f"{elsewhere} -m pdserve"


@pytest.mark.parametrize("command", ["serve", "decode", "plan", "doctor"])
def test_all_commands_refuse_the_same_files_before_anything_starts(tmp_path: Path, command: str) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(
        "Frontend: {port: 15001}\nVllmWorker: {model: demo}\nSecurity: {credentials: nowhere}\n"
        "Processor: {tool-parser-plugin: /no/parser.py}\n"
    )
    done = process(command, "-f", file, state=tmp_path / "state")
    told = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == (1 if command == "doctor" else 2)
    assert f"Security.credentials: {tmp_path / 'nowhere'} cannot be used" in told
    assert "tool-parser-plugin /no/parser.py is no file on this machine" in told
    assert "Traceback" not in told
    assert not (tmp_path / "state").exists()


def test_a_wrong_file_is_reported_without_a_traceback(pdserve: Run, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("VllmWorker: {model: demo, max-modl-len: 5}\nFrontnd: {}\n")
    for result in (pdserve("plan", "-f", path), process("decode", "-f", path, state=tmp_path)):
        assert result.returncode == 2
        assert "max-model-len" in result.stderr
        assert "Frontend" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["set"], ["set", "router=round-robin"]]
)
def test_commands_for_a_running_graph_fail_without_a_graph(
    pdserve: Run, command: list[str], tmp_path: Path
) -> None:
    result = pdserve(*command)
    assert result.returncode == 1
    assert f"no graph runs on {tmp_path / 'state'}" in result.stderr
    assert result.stdout == ""


def test_status_fails_where_no_etcd_answers_or_nothing_runs(
    pdserve: Run, etcd_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "CONNECT_WITHIN", 0.5)
    away = pdserve("status", "--etcd", "127.0.0.1:1")
    assert (away.returncode, "no etcd answers at 127.0.0.1:1" in away.stderr) == (1, True)
    empty = pdserve("status", "--etcd", etcd_url, "--namespace", namespace)
    assert (empty.returncode, "nothing runs in namespace" in empty.stderr) == (1, True)


def test_set_shows_writes_and_unsets(pdserve: Run, etcd_url: str, namespace: str) -> None:
    where = ("--etcd", etcd_url, "--namespace", namespace)
    assert "router = (as in the file)" in pdserve("set", *where).stdout
    result = pdserve("set", "max_local_prefill_length=7", "router=least-loaded", *where)
    assert result.returncode == 0
    assert "policy = threshold, since max-local-prefill-length is set " in result.stdout
    assert "max-local-prefill-length = 7 " in pdserve("set", *where).stdout
    assert "router = (as in the file)" in pdserve("set", "--unset", "router", *where).stdout


def test_credentials_are_made_and_not_lost(pdserve: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "secrets"
    result = pdserve("credentials", folder, "--host", "nats.example.com", "--host", "10.0.0.5")
    assert result.returncode == 0
    assert "Security:\n       credentials: " + str(folder) in result.stdout
    made = Credentials.load(folder)
    assert made is not None
    names = x509.load_pem_x509_certificate(made.certificate.read_bytes()).extensions
    assert "nats.example.com" in str(names.get_extension_for_class(x509.SubjectAlternativeName))
    before = made.key.read_bytes()
    result = pdserve("credentials", folder)
    assert result.returncode == 2
    assert f"{folder} exists: choose another folder, or remove it first." in result.stderr
    assert made.key.read_bytes() == before
    assert pdserve("credentials", "/proc/secrets").returncode == 2


@pytest.mark.parametrize(
    ("args", "complaint"),
    [(("decode",), "names no nats and etcd"), (("prefill", "--index", "3"), "has no prefill number 3")],
)
def test_a_role_that_cannot_run_alone_says_why(tmp_path: Path, args: tuple[str, ...], complaint: str) -> None:
    result = process(*args, "-f", LOCAL, state=tmp_path)
    assert (result.returncode, complaint in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["model is wrong.", "So is dtype."]), 2, ["model is wrong.", "So is dtype."]),
        (ExceptionGroup("", [RuntimeError(), ExceptionGroup("", [ConfigError(["wrong"])])]), 2, ["wrong"]),
        (EngineDead("boom"), 1, ["the engine is gone, and this worker with it: boom"]),
        (
            ExceptionGroup("", [RegistryUnavailable("no etcd answers")]),
            1,
            ["decode-0 failed: no etcd answers"],
        ),
        (RuntimeError("a bug"), 1, ["decode-0 failed"]),
    ],
)
def test_what_a_role_says_of_its_end(
    error: Exception, code: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert life.exit_code("decode-0", error) == code
    assert [record.getMessage() for record in caplog.records] == said
    assert [bool(record.exc_info) for record in caplog.records] == [isinstance(error, RuntimeError)] * len(
        said
    )
