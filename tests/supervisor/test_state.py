import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.supervisor import state

GRAPH = state.GraphRecord(
    os.getpid(), "/a/graph.yaml", "demo", "pdserve", "127.0.0.1:2379", "nats://127.0.0.1:4222"
)


def test_one_graph_at_a_time(tmp_path: Path) -> None:
    with (
        state.locked(tmp_path),
        pytest.raises(ConfigError, match=rf"Another graph runs on .* \(pid {os.getpid()}\)"),
        state.locked(tmp_path),
    ):
        pass
    with state.locked(tmp_path):
        pass


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    holder = (
        "import os, pathlib, sys; from pdserve.supervisor import state\n"
        "with state.locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", holder, str(tmp_path)], check=False).returncode == -9
    with state.locked(tmp_path):
        pass


def test_waits_for_the_guardian_of_a_killed_graph(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It holds the lock as well, until nothing is left of that graph."""
    holder = (
        "import os, pathlib, subprocess, sys; from pdserve.supervisor import state\n"
        "with state.locked(pathlib.Path(sys.argv[1])) as lock:\n"
        "    subprocess.Popen(['sleep', '1'], pass_fds=(lock,), stdout=subprocess.DEVNULL)\n"
        "    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", holder, str(tmp_path)], check=False).returncode == -9
    with state.locked(tmp_path):
        assert "waiting for the graph on" in caplog.text


def test_the_record_is_there_as_long_as_the_graph(tmp_path: Path) -> None:
    assert state.read(tmp_path) is None
    with state.locked(tmp_path):
        state.write(tmp_path, GRAPH)
        assert state.read(tmp_path) == GRAPH
    assert state.read(tmp_path) is None


def test_a_record_of_a_dead_graph_counts_for_nothing(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    state.write(tmp_path, state.GraphRecord(dead.pid, "f", "m", "n", "e", "q"))
    assert state.read(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"pid": "x"}'])
def test_a_damaged_record_counts_for_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "graph.json").write_text(content)
    assert state.read(tmp_path) is None


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for sockets, which pytest's own folders may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("long_temp", [False, True])
@pytest.mark.parametrize("depth", [1, 8], ids=["short", "too long for a socket"])
def test_the_folder_for_sockets_is_empty_at_both_ends(
    short_path: Path, depth: int, long_temp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir = short_path.joinpath(*["a-long-name"] * depth)
    state_dir.mkdir(parents=True)
    if long_temp:
        monkeypatch.setattr(tempfile, "tempdir", str(state_dir))
    with state.socket_folder(state_dir) as folder, socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "123e4567-e89b-12d3-a456-426614174000"))
        os.link(folder / "123e4567-e89b-12d3-a456-426614174000", short_path / "s")
    assert list(folder.iterdir()) == []
    os.link(short_path / "s", folder / "left by a graph that was killed")
    with state.socket_folder(state_dir) as again:
        assert again == folder
        assert list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_a_folder_of_another_user_is_not_emptied(short_path: Path) -> None:
    (short_path / "theirs").mkdir()
    (short_path / "theirs/file").touch()
    (short_path / "sockets").symlink_to(short_path / "theirs")
    with pytest.raises(ConfigError, match="belongs to another user"), state.socket_folder(short_path):
        pass
    assert (short_path / "theirs/file").exists()


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    """What may read it could, also where the folder was there before."""
    for _ in range(2):
        with state.locked(tmp_path):
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
        (tmp_path / "lock").chmod(0o644)
