"""Output and exit codes of the commands. Most run in this process: a new process takes half a second to start."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509

from pdserve.cli import COMMANDS, main
from pdserve.cli.find import find_slot
from pdserve.cli.operate.trace import not_found, receipt_table
from pdserve.contract.records import Role
from pdserve.contract.reports import Receipt
from pdserve.process import life
from pdserve.process.signals import ENGINE_KILLED
from pdserve.registry import etcd
from pdserve.security.credentials import Credentials
from pdserve.util.errors import ConfigError, EngineDead, RegistryUnavailable
from pdserve.util.net import free_port
from pdserve.util.program import PROGRAM_VARIABLE, program_path

LOCAL = Path(__file__).parents[2] / "configs/local.yaml"
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
    """Run a command without the environment's PDSERVE_ variables."""
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSERVE_STATE_DIR", str(tmp_path / "state"))
    for name in ("FRONTEND_PORT", "KV_PORT"):  # free ones, because `plan` reports busy ports
        monkeypatch.setenv(f"PDSERVE_{name}", str(free_port("127.0.0.1", 4)))

    def run(*args: object) -> Done:
        capsys.readouterr()
        return Done(main(list(map(str, args))), *capsys.readouterr())

    return run


def process(*args: object) -> Done:
    """Run a command in a new process, because `serve` changes logging and signals."""
    command = [sys.executable, "-m", "pdserve", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def python(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_help_lists_every_command_with_examples(pdserve: Run) -> None:
    listed = pdserve("--help").stdout
    assert [command for command in COMMANDS if f"\n  {command} " not in listed] == []
    for command in ALL:
        result = pdserve(*command.split(), "--help")
        assert (result.returncode, f"examples:\n  pdserve {command}" in result.stdout) == (0, True), command


def test_a_frontend_has_no_node_rank(pdserve: Run) -> None:
    assert "--node-rank" not in pdserve("frontend", "--help").stdout
    assert "--node-rank 1" in pdserve("decode", "--help").stdout
    refused = pdserve("frontend", "-f", str(LOCAL), "--node-rank", "1")
    assert (refused.returncode, "No such option" in refused.stderr) == (2, True)


def test_output_names_only_files_in_the_wheel(pdserve: Run, tmp_path: Path) -> None:
    for command in ALL:
        assert "configs/" not in pdserve(*command.split(), "--help").stdout, command
    for text in ("", "Frontend: {port: 8000}\n"):
        (file := tmp_path / "graph.yaml").write_text(text)
        result = pdserve("plan", "-f", file)
        assert (result.returncode, "init graph.yaml" in result.stderr) == (2, True), result.stderr


def test_help_and_plan_import_nothing_heavy() -> None:
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


def test_sigterm_stops_a_role_during_its_imports() -> None:
    """The handler is set before the imports, which take a third of a second."""
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


def test_chaos_without_its_package_says_how_to_install_it(
    pdserve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("pdserve_bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pdserve_bench", None)
    result = pdserve("chaos", "--list")
    assert result.returncode == 1
    assert re.search(r"^pdserve: pdserve chaos needs pdserve_bench\S*: run `pdserve install`", result.stderr)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "Usage: pdserve"),
        (["serv"], "pdserve: No such command 'serv'. Did you mean 'serve'?"),
        (["plan", "--fil", "x"], "pdserve: No such option: --fil (Possible options: --file)"),
        (["decode", "-f", "x", "--index", "first"], "pdserve: Invalid value for '--index'"),
        (["plan", "-f", "/no/such.yaml"], "/no/such.yaml"),
        (["set", "max-local-prefil-length=5"], "did you mean max-local-prefill-length?"),
        (["set", "max-prefill-queue-size=5\n"], "'5\\n': it takes"),
        (["set", "router"], "not KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_exits_with_2(pdserve: Run, args: list[str], complaint: str) -> None:
    result = pdserve(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_is_a_table_or_json(pdserve: Run) -> None:
    result = pdserve("plan", "-f", LOCAL)
    assert (result.returncode, result.stderr, "decode-0" in result.stdout) == (0, "", True)
    plan = json.loads(pdserve("plan", "-f", LOCAL, "--json").stdout)
    assert plan["fits"] is True
    assert [worker["name"] for worker in plan["workers"]] == ["decode-0", "prefill-0"]
    with socket.create_server(("127.0.0.1", int(os.environ["PDSERVE_FRONTEND_PORT"]))):
        busy = pdserve("plan", "-f", LOCAL)
        assert (busy.returncode, "(Frontend.port) is held by" in " ".join(busy.stdout.split())) == (2, True)
        assert pdserve("plan", "-f", LOCAL, "--gpus", "2xA10").returncode == 0


def test_plan_reports_unknown_memory(pdserve: Run, tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text("VllmWorker: {model: nobody/nothing-of-the-kind}\n")
    result = pdserve("plan", "-f", tmp_path / "hub.yaml")
    said = " ".join(result.stdout.split())
    assert (result.returncode, "It fits" in said) == (3, False)
    assert "Unknown whether it fits: nobody/nothing-of-the-kind is not in the Hugging Face cache" in said
    assert json.loads(pdserve("plan", "-f", tmp_path / "hub.yaml", "--json").stdout)["fits"] is None


def test_output_suggests_a_program_that_the_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make install` puts no program on PATH."""
    monkeypatch.delenv(PROGRAM_VARIABLE, raising=False)
    (elsewhere := tmp_path / "python").symlink_to(sys.executable)  # with no pdserve beside it
    python, usual = Path(sys.executable), "/usr/bin:/bin"
    folder = python.parent

    def suggested(python: Path, path: str, cwd: Path) -> str:
        monkeypatch.setattr("sys.executable", str(python))
        monkeypatch.setenv("PATH", path)
        monkeypatch.chdir(cwd)
        return program_path.__wrapped__()

    assert suggested(python, f"{folder}:{usual}", tmp_path) == "pdserve"
    assert suggested(python, usual, tmp_path) == f"{folder}/pdserve"
    assert suggested(python, usual, folder.parent) == f"{folder.name}/pdserve"
    assert suggested(elsewhere, usual, tmp_path) == f"{elsewhere} -P -m pdserve"


@pytest.mark.parametrize("command", ["serve", "decode", "plan", "doctor"])
def test_commands_refuse_a_wrong_file_before_anything_starts(
    pdserve: Run, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(
        "Frontend: {port: 15001}\nVllmWorker: {model: demo}\nSecurity: {credentials: nowhere}\n"
        "Processor: {tool-parser-plugin: /no/parser.py}\n"
    )
    becomes_a_process = command in ("serve", "decode")
    done = (process if becomes_a_process else pdserve)(command, "-f", file)
    told = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == (1 if command == "doctor" else 2)
    assert f"Security.credentials: {tmp_path / 'nowhere'} cannot be used" in told
    assert "tool-parser-plugin /no/parser.py is no file on this machine" in told
    assert "Traceback" not in told
    assert not (tmp_path / "state").exists()


def test_doctor_checks_only_the_roles_of_the_host(pdserve: Run, tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(
        f"Graph: {{kv-port: {free_port('127.0.0.1', 2)}}}\nFrontend: {{port: {free_port('127.0.0.1')}}}\n"
        "VllmWorker: {model: demo, engine: sim, remote-prefill: true}\n"
        "Processor: {tool-parser-plugin: /no/parser.py}\nPrefillWorker: {model: demo, engine: sim}\n"
    )
    for roles, code in ((), 1), (("decode", "prefill"), 1), (("prefill",), 0), (("both",), 2):
        done = pdserve("doctor", "-f", file, *(f"--role={role}" for role in roles))
        assert done.returncode == code, done.stdout + done.stderr


def test_commands_for_a_running_graph_fail_without_a_graph(
    pdserve: Run, tmp_path: Path, etcd_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["status", "--json"], ["set", "router=round-robin"]):
        result = pdserve(*command)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"no graph runs on {tmp_path / 'state'}" in result.stderr
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 0.5)
    away = pdserve("status", "--etcd", "127.0.0.1:1")
    assert (away.returncode, "no etcd answers at 127.0.0.1:1" in away.stderr) == (1, True)
    assert "or its etcd is down or hangs (start it again; " in away.stderr
    assert away.stderr.endswith("), or it needs --credentials.\n")
    empty = pdserve("status", "--etcd", etcd_url, "--namespace", namespace)
    assert (empty.returncode, "nothing runs in namespace" in empty.stderr) == (1, True)


def test_status_reports_that_its_file_names_no_etcd(
    pdserve: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses of systemd's units are in their env file, which a shell has to read first."""
    (file := tmp_path / "graph.yaml").write_text("VllmWorker: {model: demo, engine: sim}\n")
    missing = pdserve("status", "-f", file)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert f"{file} names no etcd, and no graph runs on {tmp_path / 'state'}" in missing.stderr
    assert "PDSERVE_ETCD (under systemd: `set -a; . /etc/pdserve/env`)" in missing.stderr
    assert "say which one" not in missing.stderr
    monkeypatch.setenv("PDSERVE_ETCD", "127.0.0.1:1")
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 0.5)
    assert "no etcd answers at 127.0.0.1:1" in pdserve("status", "-f", file).stderr


def test_an_empty_variable_for_the_state_directory_is_ignored(
    pdserve: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PDSERVE_STATE_DIR", "")
    assert f"no graph runs on {tmp_path / '.pdserve'}" in pdserve("status").stderr


def test_credentials_are_made_and_never_overwritten(pdserve: Run, tmp_path: Path) -> None:
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
    ("role", "index", "complaint"),
    [(Role.DECODE, 0, "names no nats and etcd"), (Role.PREFILL, 3, "has no prefill number 3")],
)
@pytest.mark.usefixtures("pdserve")
def test_a_role_that_cannot_run_alone_says_why(role: Role, index: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_slot(role, LOCAL, index, 0)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["model is wrong.", "So is dtype."]), 2, ["model is wrong.", "So is dtype."]),
        (ExceptionGroup("", [RuntimeError(), ExceptionGroup("", [ConfigError(["wrong"])])]), 2, ["wrong"]),
        (
            EngineDead("boom", killed=True),
            ENGINE_KILLED,
            ["engine process died; exiting: boom"],
        ),
        (EngineDead("boom"), 1, ["engine process died; exiting: boom"]),
        (
            ExceptionGroup("", [RegistryUnavailable("no etcd answers")]),
            1,
            ["decode-0 failed: no etcd answers"],
        ),
        (RuntimeError("a bug"), 1, ["decode-0 failed"]),
    ],
)
def test_a_role_logs_why_it_ends(
    error: Exception, code: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert life.exit_code("decode-0", error) == code
    assert [record.getMessage() for record in caplog.records] == said
    traced = isinstance(error, RuntimeError)
    assert all(bool(record.exc_info) == traced for record in caplog.records)


def test_the_table_of_requests_ends_with_the_newest() -> None:
    newest_first = [Receipt(name, "frontend-0", "/v1", 1.0) for name in ("newest", "older")]
    assert list(receipt_table(newest_first).columns[0].cells) == ["older", "newest"]


def test_the_table_of_requests_names_models_if_there_are_two() -> None:
    receipts = [Receipt(model, "f", "/", 1.0, model=model) for model in ("one", "two")]
    assert [column.header for column in receipt_table(receipts).columns].count("model") == 1
    assert "model" not in [column.header for column in receipt_table(receipts[:1]).columns]


def test_a_short_request_id_is_refused() -> None:
    assert not_found("4c86", []).startswith("4c86 is too short: give at least 6 characters")
    assert not_found("4c86aa", []).startswith("no frontend has a receipt of 4c86aa ")


def test_setting_and_unsetting_a_key_is_refused(pdserve: Run) -> None:
    result = pdserve("set", "router=kv", "--unset", "router")
    assert (result.returncode, "router is both set and unset" in result.stderr) == (2, True)


def test_chaos_lists_only_the_selected_faults(pdserve: Run) -> None:
    assert [
        line.split()[0] for line in pdserve("chaos", "--list", "--only", "etcd-kill").stdout.splitlines()
    ] == ["etcd-kill"]
    assert pdserve("chaos", "--list", "--only", "foo").returncode == 2
