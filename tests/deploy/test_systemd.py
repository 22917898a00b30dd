"""systemd accepts the units, and their settings fit the roles."""

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
        text = unit.read_text().replace("/opt/pdserve/bin/pdserve", "/bin/true")
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
        assert options[:2] == ["-f", "/etc/pdserve/graph.yaml"]
        for variable, port in re.findall(r"(PDSERVE_\w+)=(\d+)", text):
            assert variable in VARIABLES
            ports.append(int(port))
    assert len(ports) == 7
    assert min(after - before for before, after in zip(sorted(ports), sorted(ports)[1:], strict=False)) >= 10


def test_a_role_starts_again_whatever_its_exit_code() -> None:
    """Also after exit code 2, because at boot the address, model folder or GPU driver may come later than the unit."""
    assert setting(COMMON, "Restart") == "always"
    assert setting(COMMON, "StartLimitIntervalSec") == "0"
    assert "RestartPreventExitStatus" not in COMMON


def test_timeouts_of_systemd_are_longer_than_those_of_a_role() -> None:
    assert int(setting(COMMON, "TimeoutStopSec")) > 2 * Config.drain_timeout
    assert int(setting(COMMON, "WatchdogSec")) > HANGS_AFTER
    assert setting(COMMON, "KillMode") == "mixed"
    variables = set(re.findall(r"^#?(PDSERVE_\w+)=", (FOLDER / "env").read_text(), re.M))
    assert variables <= {*VARIABLES, "PDSERVE_API_KEYS"}
