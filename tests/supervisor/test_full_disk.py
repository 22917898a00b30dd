"""A disk that runs full, and has space again: nothing ends, and everything comes back by itself."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.credentials import Credentials
from pdserve.demo import MODEL_DIR
from pdserve.errors import ConfigError, Unavailable
from pdserve.stream.archives import pack_model, unpack
from pdserve.supervisor import state
from pdserve.supervisor.child import Child
from pdserve.supervisor.output import ProcessOutput
from tests.full_disk import Disk, small_disk
from tests.supervisor.fakes import fake


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_log_lines_are_dropped_and_come_back(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    shown = StringIO()
    output = ProcessOutput(disk.path / "logs", stream=shown)
    output.line("decode-0", "before")
    disk.fill()
    for number in range(500):
        output.line("decode-0", f"full {number:04} " + "x" * 100)
    output.line("prefill-0", "a file that cannot even be made has no space either" * 100)
    assert caplog.text.count("its lines are dropped: [Errno 28] No space left on device") in (1, 2)
    disk.free()
    for name in ("decode-0", "prefill-0"):
        output.line(name, "after")
        output.line(name, "and on")
    output.close()
    assert "full 0499" in shown.getvalue()
    lines = (disk.path / "logs/decode-0.log").read_text().splitlines()
    assert lines[0].endswith("before")
    assert lines[-2].endswith("after")
    assert lines[-1].endswith("and on")
    assert "after" in (disk.path / "logs/prefill-0.log").read_text()


async def test_a_line_that_cannot_be_taken_ends_no_reader() -> None:
    def take(line: str) -> None:
        raise KeyError(line)

    end = await Child("decode-0", fake("for i in range(50): print(i)").command, take).wait()
    assert (end.code, end.last_lines[-1]) == (0, "49")


def test_a_terminal_that_is_a_file_comes_back(disk: Disk) -> None:
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


def test_the_state_is_refused_in_a_sentence_and_stays_whole(disk: Disk) -> None:
    graph = state.GraphRecord(1, "a.yaml", "demo", "ns", "etcd", "nats", "x" * 5000)
    with state.locked(disk.path) as folder:
        folder.record(graph)
        disk.fill()
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            folder.record(replace(graph, model="another"))
        folder.mend()
        disk.free()
        assert state.read(disk.path) == graph
        disk.fill()
    with state.locked(disk.path):
        pass


def test_a_model_archive_is_unpacked_when_there_is_space(disk: Disk) -> None:
    archive = pack_model(MODEL_DIR) if (MODEL_DIR / "config.json").exists() else b""
    disk.fill()
    with pytest.raises(Unavailable, match="No space left"):
        unpack(archive, disk.path / "models")
    disk.free()
    assert (unpack(archive, disk.path / "models") / "config.json").exists()
    assert len(list((disk.path / "models").iterdir())) == 1, "nothing half unpacked is left"


def test_credentials_that_cannot_be_written_are_a_wrong_configuration(disk: Disk) -> None:
    """Those before stay as they were: nothing half written is left."""
    with state.locked(disk.path) as folder:
        before = folder.fresh_credentials()
        disk.fill()
        with pytest.raises(ConfigError, match=r"state directory .* cannot be written"):
            folder.fresh_credentials()
        assert Credentials.load(before.folder) == before
        assert [path.name for path in disk.path.iterdir() if path.is_dir()] == ["credentials"]
        disk.free()
        assert folder.fresh_credentials() == before
