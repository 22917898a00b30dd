"""Host memory of engines on the CPU returns the stored blocks. With real engines: `tests/e2e/test_offload.py`."""

import json
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from pdserve.contract.records import Role
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm.process import VllmProcess
from pdserve.kv.tiers.host_memory import HostWorker, PdserveConnectors


def test_blocks_come_back_into_other_places() -> None:
    layers = [torch.randint(-128, 128, (6, 4), dtype=torch.int8) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    groups = [[CanonicalKVCacheRef(0, 4), CanonicalKVCacheRef(1, 4)], [CanonicalKVCacheRef(2, 4)]]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(layer, 4) for layer in layers], groups)
    worker = HostWorker(caches, [torch.empty((5, 4), dtype=torch.int8) for _ in layers])
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


class Child:
    """A scheduler's connector. Its metadata: newly allocated blocks, whose earlier copies must end first."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(_current_batch_allocated_block_ids=set())

    def bind_kv_cache_manager(self, manager: object) -> None: ...

    def build_connector_meta(self, output: object) -> set[int]:
        found: set[int] = self.scheduler._current_batch_allocated_block_ids
        self.scheduler._current_batch_allocated_block_ids = set()
        return found


def test_copies_end_before_any_of_their_blocks_is_reused() -> None:
    connectors = PdserveConnectors.__new__(PdserveConnectors)
    connectors._connectors, connectors._extra_async_saves = [Child(), Child()], {}
    pool = BlockPool(8, enable_caching=True, hash_block_size=32)
    connectors.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))
    given = {block.block_id for count in (2, 1) for block in pool.get_new_blocks(count)}
    assert len(given) == 3
    assert connectors.build_connector_meta(None).metadata == (set(), given)
    assert connectors.build_connector_meta(None).metadata == (set(), set())


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
