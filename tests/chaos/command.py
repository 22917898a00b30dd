"""Run `pdserve chaos` as a user does."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.serving import processes_below


@dataclass
class Run:
    """A run of `pdserve chaos` in its own folder. A successful run leaves only output files there."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @classmethod
    def start(cls, folder: Path, file: Path, *options: str) -> "Run":
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pdserve", "chaos", "-f", str(file), *options]
        with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
            environment = {**os.environ, "TMPDIR": str(folder)}
            process = subprocess.Popen(
                [*command, "--json", str(folder / "card.json")], env=environment, stdout=out, stderr=log
            )
        return cls(process, folder)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / "card.json").read_text())["rows"]
        return found

    def good(self) -> list[dict[str, Any]]:
        """Wait for the run's end, check that every fault's row is good and that no process or folder is left, and
        return these rows."""
        code = self.process.wait()
        assert code == 0, self.log[-8000:] + self.out
        calm, *rows = self.rows
        assert calm["fault"] == "none"
        assert all(row["fault"] in self.out for row in rows)
        for row in rows:
            assert row["victim"], row
            assert row["requests"] >= 8, row
            assert not any(row[what] for what in ("failed", "hung", "wrong", "leaked", "queued", "skipped"))
        assert not list(self.folder.glob("pdserve-chaos-*"))
        assert self.processes() == []
        return rows

    def processes(self) -> list[psutil.Process]:
        """Return the run's processes that still exist."""
        return processes_below(self.folder)
