"""The Grafana dashboard of deploy/, as data."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.compose import FOLDER

FILE: Path = FOLDER / "grafana/provisioning/dashboards/pdserve.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
_VARIABLES = {"$model": ".*", "$__rate_interval": "1m", "$__range": "1m"}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (title of the panel, PromQL expression), with values for Grafana's variables."""
    for panel in PANELS:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, f"{panel['title']}: unknown variable"
            yield panel["title"], expression
