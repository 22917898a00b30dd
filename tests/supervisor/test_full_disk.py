"""After a full disk has space again, everything works without a restart."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.demo import MODEL_DIR
from pdserve.security.credentials import Credentials
from pdserve.stream.archives import pack_model, unpack
from pdserve.supervisor import state
from pdserve.supervisor.output import ProcessOutput
from pdserve.util.errors import ConfigError, Unavailable
from tests.full_disk import Disk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_redirected_output_continues_after_a_full_disk(disk: Disk) -> None:
    """The output of `serve` is redirected to a file on the full disk."""
    with (disk.path / "stderr").open("w", buffering=1) as file:
        output = ProcessOutput(disk.path / "logs", stream=file)
        output.print("before")
        disk.fill()
        for _ in range(100):
            output.print("full" + "x" * 200)
        disk.free()
        output.print("after")
        output.close()
    assert "after" in (disk.path / "stderr").read_text()


def test_a_model_archive_is_unpacked_when_there_is_space(disk: Disk) -> None:
    archive = pack_model(MODEL_DIR) if (MODEL_DIR / "config.json").exists() else b""
    disk.fill()
    with pytest.raises(Unavailable, match="No space left"):
        unpack(archive, disk.path / "models")
    disk.free()
    assert (unpack(archive, disk.path / "models") / "config.json").exists()
    assert len(list((disk.path / "models").iterdir())) == 1, "nothing half unpacked is left"


def test_state_that_cannot_be_written_is_refused_and_stays_whole(disk: Disk) -> None:
    graph = state.GraphRecord(1, "a.yaml", "demo", "ns", "etcd", "nats", "x" * 5000)
    why = "state directory .* cannot be written: No space left on device"
    with state.locked(disk.path) as folder:
        folder.record(graph)
        credentials = folder.fresh_credentials()
        disk.fill()
        with pytest.raises(ConfigError, match=why):
            folder.record(replace(graph, model="another"))
        with pytest.raises(ConfigError, match=why):
            folder.fresh_credentials()
        folder.restore()
        assert Credentials.load(credentials.folder) == credentials
        assert [path.name for path in disk.path.iterdir() if path.is_dir()] == ["credentials"]
        disk.free()
        assert state.read(disk.path) == graph
        assert folder.fresh_credentials() == credentials
        disk.fill()
    with state.locked(disk.path):
        pass
