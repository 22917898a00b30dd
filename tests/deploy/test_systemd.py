"""systemd accepts the units, and their settings fit the roles."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pdserve.cli import COMMANDS
from pdserve.config.env_overrides import VARIABLES
from pdserve.config.schema import Config
from pdserve.supervisor.processes.alone import HANGS_AFTER

FOLDER = Path(__file__).parent.parent.parent / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
COMMON = (FOLDER / "pdserve-.service.d/common.conf").read_text()


def setting(text: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", text, re.M)
    return str(value)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    for unit in UNITS:
        text = unit.read_text().replace("/opt/pdserve/current/bin/pdserve", "/bin/true")
        (tmp_path / unit.name.replace("@", "@0")).write_text(text)
    units = [str(tmp_path / unit.name.replace("@", "@0")) for unit in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_each_unit_runs_a_role_with_its_own_ports() -> None:
    ports = []
    for unit in UNITS:
        text = unit.read_text()
        _, role, *options = shlex.split(setting(text, "ExecStart"))
        assert role in COMMANDS
        assert unit.name.removeprefix("pdserve-").startswith(role)
        assert unit.stem.endswith("@"), "a template: an upgrade starts a frontend's successor beside it"
        assert options == ["-f", "${GRAPH}", "--index", "${INDEX}"]
        for variable, port in re.findall(r"(PDSERVE_\w+)=(\d+)", text):
            assert variable in VARIABLES
            ports.append(int(port))
    assert len(ports) == 7
    assert min(after - before for before, after in zip(sorted(ports), sorted(ports)[1:], strict=False)) >= 10


def test_a_unit_may_have_its_own_settings_file() -> None:
    """The file can also set the graph's file and the index, for a second model. systemd reads the files in order, after
    `Environment=`."""
    files = re.findall(r"^EnvironmentFile=(.*)$", COMMON, re.M)
    assert files == ["/etc/pdserve/env", "-/etc/pdserve/%N.env"]
    assert "Environment=GRAPH=/etc/pdserve/graph.yaml INDEX=%i\n" in COMMON
    page = (FOLDER.parents[1] / "docs/hosts.md").read_text()
    name, settings = re.findall(r"\$ cat (/etc/pdserve/pdserve-decode@\w+\.env)\n((?:\w+=.*\n)+)", page)[0]
    given = dict(line.split("=") for line in settings.splitlines())
    assert set(given) <= {"GRAPH", "INDEX", "CUDA_VISIBLE_DEVICES", *VARIABLES}
    decode = (FOLDER / "pdserve-decode@.service").read_text()
    assert {"GRAPH", "INDEX", *re.findall(r"(PDSERVE_\w+_PORT)=", decode)} <= set(given)
    assert f"enable --now {Path(name).stem}" in page


@pytest.mark.parametrize("unit", [unit.name.replace("@", "@0") for unit in UNITS])
def test_only_folders_of_pdserve_may_be_written(unit: str) -> None:
    """Checks the unit as systemd sees it, with the shared settings."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd here")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--json=short", unit],
        env={"SYSTEMD_UNIT_PATH": f"{FOLDER}:"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {each["name"]: each for each in json.loads(done.stdout)}
    for sandbox in ("ProtectSystem=", "ProtectHome=", "PrivateTmp=", "NoNewPrivileges="):
        assert found[sandbox]["set"], found[sandbox]
    assert setting(COMMON, "ReadWritePaths") == "-/srv/pdserve"


def test_a_role_starts_again_whatever_its_exit_code() -> None:
    """At boot, the address, model folder or GPU driver may come later than the unit."""
    assert setting(COMMON, "Restart") == "always"
    assert setting(COMMON, "StartLimitIntervalSec") == "0"
    assert "RestartPreventExitStatus" not in COMMON


def test_timeouts_of_systemd_are_longer_than_those_of_a_role() -> None:
    assert int(setting(COMMON, "TimeoutStopSec")) > 2 * Config.drain_timeout
    assert int(setting(COMMON, "WatchdogSec")) > HANGS_AFTER
    assert setting(COMMON, "KillMode") == "mixed"
    variables = set(re.findall(r"^#?(PDSERVE_\w+)=", (FOLDER / "env").read_text(), re.M))
    assert variables <= {*VARIABLES, "PDSERVE_API_KEYS", "PDSERVE_ENGINE"}
