"""Host memory of engines on the CPU: what is loaded was stored. With real engines: `tests/e2e/test_offload.py`."""

import json

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm.process import VllmProcess
from pdserve.kv.host import HostWorker
from pdserve.records import Role


def test_blocks_come_back_into_other_places() -> None:
    layers = [torch.randint(-128, 128, (6, 4), dtype=torch.int8) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    groups = [[CanonicalKVCacheRef(0, 4), CanonicalKVCacheRef(1, 4)], [CanonicalKVCacheRef(2, 4)]]
    worker = HostWorker(CanonicalKVCaches([CanonicalKVCacheTensor(layer, 4) for layer in layers], groups), 5)
    places = CPULoadStoreSpec([4, 0, 2])
    worker.submit_store(1, GPULoadStoreSpec([1, 3, 5], [2, 1], [0, 0]), places)
    for layer in layers:
        layer.zero_()
    worker.submit_load(2, places, GPULoadStoreSpec([2, 0, 4], [2, 1], [0, 0]))
    for layer, old, moved in zip(layers, before, ({2: 1, 0: 3}, {2: 1, 0: 3}, {4: 5}), strict=True):
        for block in range(6):
            expected = old[moved[block]] if block in moved else torch.zeros(4)
            assert layer[block].tolist() == expected.tolist()
    done = worker.get_finished()
    assert [(each.job_id, each.success, each.transfer_size) for each in done] == [
        (1, True, 20),
        (2, True, 20),
    ]
    assert worker.get_finished() == []


@pytest.mark.parametrize(
    ("disaggregated", "offload", "connectors"),
    [
        (True, 0, ["PdserveConnector"]),
        (True, 1 << 30, ["PdserveConnectors", "PdserveConnector", "OffloadingConnector"]),
        (False, 1 << 30, ["PdserveConnectors", "OffloadingConnector"]),
        (False, 0, []),
    ],
)
def test_connectors_of_an_engine(disaggregated: bool, offload: int, connectors: list[str]) -> None:
    spec = EngineSpec(Role.PREFILL, "p", "demo", disaggregated=disaggregated, kv_offload=offload)
    argv = VllmProcess(spec)._argv("ipc:///events")
    found = [word.partition("=")[2] for word in argv if word.startswith("--kv-transfer-config")]
    configs = [json.loads(word) for word in found]
    for config in configs:
        assert (config["engine_id"], config["kv_load_failure_policy"]) == ("p", "recompute")
    inside = [
        part for config in configs for part in config["kv_connector_extra_config"].get("connectors", [])
    ]
    assert [config["kv_connector"] for config in configs + inside] == connectors
