"""What Compose does with our files, without Docker: variables, merging, known keys. Also helpers for tests of
deploy/."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy"

SERVICE_KEYS = {
    *("build", "image", "command", "profiles", "depends_on", "restart", "stop_grace_period", "healthcheck"),
    *("environment", "ports", "volumes", "network_mode", "ipc", "cap_add", "ulimits", "deploy"),
}
"""The service keys that our files use, so that a misspelt key is found."""
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}


def installed(tool: Path) -> str:
    """Return the path of a tool that `make dev` installs. Without it, skip the test; in CI, fail."""
    if not tool.exists():
        assert not os.environ.get("CI"), f"{tool} is missing: deploy/test-tools.sh installs it"
        pytest.skip(f"{tool} is missing: deploy/test-tools.sh installs it, some tools as root on Debian only")
    return str(tool)


def load(*names: str, **variables: str) -> dict[str, Any]:
    """Merge the files in order, like `docker compose -f A -f B`; a later list replaces an earlier one."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, yaml.safe_load(_interpolate((FOLDER / name).read_text(), variables)))
    return merged


def _interpolate(text: str, variables: Mapping[str, str]) -> str:
    done = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)
    assert "$" not in re.sub(r"#.*", "", done), "a variable without a default"
    return done


def _merge(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merge(below.get(key), value) for key, value in above.items()}
    return above


def replaced(words: list[str], substitutes: Mapping[str, str]) -> list[str]:
    """Replace parts of words. Each must occur: otherwise a renamed flag would go untested."""
    for old, new in substitutes.items():
        assert any(old in word for word in words), f"{old} is not in {words}"
        words = [word.replace(old, new) for word in words]
    return words
