"""`pdserve chaos` as a user runs it, its short form: simulated engines, two of each, everything killed once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096, num-gpu-blocks-override: 600}
Graph: {drain-timeout: 5}
Frontend: {served_model_name: demo}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 64
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
PrefillWorker:
  engine: sim
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
"""


@pytest.mark.chaos
def test_everything_killed_once_and_nothing_dropped(tmp_path: Path) -> None:
    file, card = tmp_path / "sim.yaml", tmp_path / "card.json"
    file.write_text(YAML)
    command = [sys.executable, "-m", "pdserve", "chaos", "-f", str(file)]
    options = ["--only", "kill", "--seconds", "3", "--json", str(card)]
    result = subprocess.run(
        [*command, *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-5000:] + result.stdout
    rows = {row["fault"]: row for row in json.loads(card.read_text())["rows"]}
    killed = ["prefill-kill", "decode-kill", "nats-kill", "etcd-kill", "frontend-kill"]
    assert list(rows) == ["none", *killed]
    assert all(row["requests"] >= 8 and not row["skipped"] for row in rows.values())
    assert all(rows[name]["victim"] for name in killed)
    assert all(name in result.stdout for name in rows)
    assert not list(tmp_path.glob("pdserve-chaos-*"))
    assert _mentioning(str(tmp_path)) == []


def _mentioning(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if text in " ".join(process.cmdline()) or text in process.environ().get("PDSERVE_STATE_DIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.chaos
def test_told_to_stop_in_the_middle_it_leaves_nothing(tmp_path: Path) -> None:
    file, log = tmp_path / "sim.yaml", tmp_path / "log"
    file.write_text(YAML)
    command = [
        sys.executable,
        "-m",
        "pdserve",
        "chaos",
        "-f",
        str(file),
        "--only",
        "decode-hang",
        "--hold",
        "200",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=out, stderr=out
        )
    deadline = time.monotonic() + 180
    while "decode-hang: decode-" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    process.terminate()
    assert process.wait(60) == 130, log.read_text()
    assert _mentioning(str(tmp_path)) == []
