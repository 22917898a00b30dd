import asyncio
import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.credentials import Credentials
from pdserve.errors import ConfigError
from pdserve.supervisor import state
from tests.conditions import until

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


def test_waits_for_the_guardian_of_a_killed_graph(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It holds the lock as well, until nothing is left of that graph."""
    holder = (
        "import os, pathlib, subprocess, sys; from pdserve.supervisor import state\n"
        "with state.locked(pathlib.Path(sys.argv[1])) as folder:\n"
        "    subprocess.Popen(['sleep', '1'], pass_fds=(folder.lock,), stdout=subprocess.DEVNULL)\n"
        "    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", holder, str(tmp_path)], check=False).returncode == -9
    with state.locked(tmp_path):
        assert "waiting for the graph on" in caplog.text


def test_the_record_is_there_as_long_as_the_graph(tmp_path: Path) -> None:
    assert state.read(tmp_path) is None
    with state.locked(tmp_path) as folder:
        folder.record(GRAPH)
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
def test_the_folder_for_sockets_is_empty_at_first_and_removed_in_the_end(
    short_path: Path, depth: int, long_temp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir = short_path.joinpath(*["a-long-name"] * depth)
    state_dir.mkdir(parents=True)
    if long_temp:
        monkeypatch.setattr(tempfile, "tempdir", str(state_dir))
    with state.locked(state_dir) as held:
        with held.sockets() as folder, socket.socket(socket.AF_UNIX) as left:
            assert folder.stat().st_mode & 0o777 == 0o700
            left.bind(str(folder / "123e4567-e89b-12d3-a456-426614174000"))
            os.link(folder / "123e4567-e89b-12d3-a456-426614174000", short_path / "s")
        assert not folder.exists()
        folder.mkdir()
        os.link(short_path / "s", folder / "left by a graph that was killed")
        with held.sockets() as again:
            assert again == folder
            assert list(folder.iterdir()) == []
        assert not folder.exists()


def test_a_folder_of_another_user_is_not_emptied(short_path: Path) -> None:
    (short_path / "theirs").mkdir()
    (short_path / "theirs/file").touch()
    (short_path / "sockets").symlink_to(short_path / "theirs")
    with (
        state.locked(short_path) as folder,
        pytest.raises(ConfigError, match="belongs to another user"),
        folder.sockets(),
    ):
        pass
    assert (short_path / "theirs/file").exists()


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    """What may read the folder could, also where it was there before."""
    for _ in range(2):
        with state.locked(tmp_path):
            assert tmp_path.stat().st_mode & 0o777 == 0o700
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
        tmp_path.chmod(0o755)
        (tmp_path / "lock").chmod(0o644)


def test_a_folder_that_all_users_share_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with state.locked(tmp_path):
        assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_a_second_graph_is_refused_without_the_lock_file_and_changes_nothing(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        credentials = folder.fresh_credentials()
        folder.record(GRAPH)
        before = _content(tmp_path)
        (tmp_path / "lock").unlink()
        with pytest.raises(ConfigError, match="Another graph runs on"), state.locked(tmp_path):
            pass
        folder.mend()
        assert _content(tmp_path) == before
        assert Credentials.load(credentials.folder) == credentials


@pytest.fixture
def no_locks_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    flock = fcntl.flock

    def of_files(opened: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(opened, how)

    monkeypatch.setattr(fcntl, "flock", of_files)


@pytest.mark.usefixtures("no_locks_of_folders")
def test_one_graph_at_a_time_where_only_files_can_be_locked(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), state.locked(tmp_path):
                pass
            (tmp_path / "lock").unlink()
            folder.mend()


def test_what_vanishes_of_the_folder_is_made_anew(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each by itself, and all of it."""
    state_dir = short_path / "state"
    with state.locked(state_dir) as folder:
        credentials = folder.fresh_credentials()
        folder.record(GRAPH)
        with folder.sockets() as sockets:
            before = _content(state_dir)
            for path in (sockets, credentials.folder, credentials.key, state_dir / "graph.json", state_dir):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                folder.mend()
                assert _content(state_dir) == before
                assert f"{path} had vanished" in caplog.text or path == credentials.folder
            assert Credentials.load(credentials.folder) == credentials
            assert {path.stat().st_mode & 0o077 for path in state_dir.rglob("*")} == {0}
            with pytest.raises(ConfigError, match="Another graph runs on"), state.locked(state_dir):
                pass
            (state_dir / "graph.json").write_text("not ours")
            folder.mend()
            assert state.read(state_dir) == GRAPH


async def test_a_folder_that_cannot_be_mended_is_reported_once_and_mended_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LOOK_EVERY", 0.01)
    with state.locked(tmp_path) as folder:
        credentials = folder.fresh_credentials()
        shutil.rmtree(credentials.folder)
        credentials.folder.write_text("in the way")
        looking = asyncio.create_task(folder.look_after())
        await until(lambda: "cannot be made anew" in caplog.text)
        credentials.folder.unlink()
        await until(credentials.key.exists)
        looking.cancel()
    assert caplog.text.count("cannot be made anew") == 1


def test_a_graph_that_took_the_place_of_a_removed_folder_is_left_alone(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with state.locked(state_dir) as first:
        first.record(GRAPH)
        shutil.rmtree(state_dir)
        with state.locked(state_dir) as second:
            second.record(GRAPH)
            second.fresh_credentials()
            before = _content(state_dir)
            with pytest.raises(ConfigError, match="another graph runs there now"):
                first.mend()
            first.leave()
            assert _content(state_dir) == before


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
