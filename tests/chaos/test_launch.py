"""How chaos derives the file of the graph that it tests."""

import json
from pathlib import Path

import pytest
from pdserve_bench.graphs.launch import SIM_SPEED, derive
from pdserve_bench.graphs.sections import Sections

from pdserve.config.load import load
from pdserve.config.schema import SecuritySection
from pdserve.util.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


def _loaded(file: Path, folder: Path, dtype: str = "") -> tuple[Sections, Path]:
    sections = derive(file, 2, 8123, 20100, dtype)
    written = folder / "derived.yaml"
    written.write_text(json.dumps(sections))
    return sections, written


def test_a_derived_file_has_two_of_each_role_and_its_own_ports(tmp_path: Path) -> None:
    config = load(_loaded(ROOT / "configs/local.yaml", tmp_path, dtype="float32")[1], {})
    assert config.frontend is not None
    assert config.decode is not None
    assert config.prefill is not None
    assert (config.frontend.processes, config.decode.count, config.prefill.count) == (2, 2, 2)
    assert (config.frontend.port, config.kv_port, config.served_model_name) == (8123, 20100, "demo")
    assert config.decode.engine_args["dtype"] == config.prefill.engine_args["dtype"] == "float32"


def test_a_derived_file_has_no_servers_or_credentials_of_the_original(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(
        "Common: {model: demo}\n"
        "Graph: {nats: 'nats://10.0.0.5:4222', etcd: '10.0.0.5:2379', state_dir: /elsewhere, kv_port: 7}\n"
        "Security: {credentials: theirs, tls-certificate: a, tls-key: b, api-keys: c}\n"
        "Frontend: {port: 80, host: 0.0.0.0, ServiceArgs: {workers: 3}}\n"
        "VllmWorker: {engine: sim, common-configs: [model], ServiceArgs: {workers: 4}}\n"
    )
    sections, written = _loaded(file, tmp_path)
    config = load(written, {})
    assert config.nats is None
    assert config.etcd is None
    assert config.security == SecuritySection()
    assert config.frontend is not None
    assert config.decode is not None
    assert (config.frontend.processes, config.decode.count, config.prefill) == (3, 4, None)
    assert config.decode.engine_args["additional-config"] == SIM_SPEED
    assert "PrefillWorker" not in sections


def test_a_file_without_a_frontend_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("Common: {model: demo}\nVllmWorker: {engine: sim, common-configs: [model]}\n")
    with pytest.raises(ConfigError, match="has no Frontend section"):
        derive(file, 2, 8123, 20100)
