import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.config.schema import Config
from pdserve.registry import connect
from pdserve.runtime.tasks import TaskOwner
from pdserve.supervisor import state
from pdserve.supervisor.servers.kept_keys import KeptKeys
from tests.conditions import holds, until
from tests.memory.registry import MemoryRegistry, MemoryServer


def _kept(folder: state.StateFolder, namespace: str, file: str = "graph.yaml") -> KeptKeys:
    config = Config(folder.path / file, "m", "m", None, None, None, namespace=namespace)
    return KeptKeys(folder, config, None)


def _file(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return found


async def _filled(etcd: str, kept: KeptKeys, namespace: str) -> dict[str, bytes]:
    await kept.fill(etcd)
    async with connect(etcd, namespace) as registry:
        return {key: value for key, value in (await registry.read("")).items() if key != "file"}


async def test_the_file_follows_changes_but_not_the_loss_of_all_keys(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        async with MemoryRegistry(MemoryServer()) as registry, TaskOwner() as tasks:
            await registry.put("file", b"graph.yaml", leased=False)
            tasks.start(_kept(folder, "ns").follow(registry), "kept keys")
            for key in ("settings/a", "settings/b", "adapters/m/blue", "instances/x"):
                await registry.put(key, b"1", leased=False)
            await registry.delete("settings/b")
            after = {"adapters/m/blue": "1", "file": "graph.yaml", "settings/a": "1"}
            await until(lambda: (tmp_path / "settings.json").exists() and _file(tmp_path) == after)
            for key in ("file", "settings/a", "adapters/m/blue"):
                await registry.delete(key)
            await holds(lambda: _file(tmp_path) == after)
            await registry.put("settings/c", b"1", leased=False)
            await registry.put("file", b"graph.yaml", leased=False)
            await until(lambda: _file(tmp_path) == {"file": "graph.yaml", "settings/c": "1"})


async def test_settings_of_another_file_are_ignored_and_adapters_kept(
    tmp_path: Path, etcd_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`fill` does not put these settings into etcd. They stay in settings.json until `follow` removes them."""
    kept = {"file": str(tmp_path / "graph.yaml"), "settings/a": "1", "adapters/m/blue": "2"}
    (tmp_path / "settings.json").write_text(json.dumps(kept))
    with state.locked(tmp_path) as folder:
        other = await _filled(etcd_url, _kept(folder, namespace, "other.yaml"), namespace)
        assert other == {"adapters/m/blue": b"2"}
        assert f"dropped live setting a=1: it was set for {tmp_path}/graph.yaml" in caplog.text
        same = await _filled(etcd_url, _kept(folder, namespace), namespace)
        assert same == {"adapters/m/blue": b"2", "settings/a": b"1"}


@pytest.mark.parametrize("damage", [b"", bytes(100), b'{"file": "graph', b'{"settings/a": "\xff"}', b"[]"])
async def test_a_damaged_file_is_renamed(
    tmp_path: Path, etcd_url: str, namespace: str, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "settings.json").write_bytes(damage)
    with state.locked(tmp_path) as folder:
        assert await _filled(etcd_url, _kept(folder, namespace), namespace) == {}
    aside = tmp_path / "settings.json.damaged"
    assert aside.read_bytes() == damage
    assert f"starting without live settings and adapters; keeping it as {aside}" in caplog.text
