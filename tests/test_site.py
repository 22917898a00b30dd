"""The site of README.md and docs/ (`make docs`)."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """The build is strict: a page that no list names, or a dead link or anchor, fails it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "make serve" in (tmp_path / "index.html").read_text()
    assert "0001: " in (tmp_path / "decisions/index.html").read_text()
    assert "--namespace NAME" in (tmp_path / "commands/index.html").read_text()
