"""Prometheus and promtool as `make dev` installs them, with the files of deploy/."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from pdserve.util.net import free_port
from tests.deploy.compose import FOLDER, installed, replaced

TOOLS = Path(sys.prefix) / "tools/usr/bin"


def promtool(*words: str, said: str = "") -> "subprocess.CompletedProcess[str]":
    command = [installed(TOOLS / "promtool"), *words]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the response's `data`; raise if Prometheus refuses the query."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    def firing(self) -> set[str]:
        """Return name and summary of each firing alert."""
        alerts = self.ask("alerts")["alerts"]
        return {
            f"{each['labels']['alertname']}: {each['annotations']['summary']}"
            for each in alerts
            if each["state"] == "firing"
        }

    def series(self, expression: str) -> list[tuple[dict[str, str], float]]:
        found = self.ask("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]


@contextmanager
def scraping(folder: Path, *targets: str, **options: object) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of the Compose file, but scrape the targets each second and fire alerts
    after two seconds. `options`: further keys of the scrape job."""
    alerts = folder / "alerts.yml"
    alerts.write_text(re.sub(r"for: \d+[sm]", "for: 2s", (FOLDER / "alerts.yml").read_text()))
    addresses = '", "'.join(targets)
    ours = {"127.0.0.1:8000": addresses, "_interval: 5s": "_interval: 1s", "alerts.yml": str(alerts)}
    file = folder / "prometheus.yml"
    lines = (FOLDER / "prometheus.yml").read_text().splitlines()
    config = yaml.safe_load("\n".join(replaced(lines, ours)))
    config["scrape_configs"][0] |= options
    file.write_text(yaml.safe_dump(config))
    port = free_port("127.0.0.1")
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [installed(TOOLS / "prometheus"), *flags, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            _until_ready(http, process)
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(30)


def _until_ready(http: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, "prometheus ended"
        assert time.monotonic() < deadline, "prometheus does not get ready"
        time.sleep(0.05)
