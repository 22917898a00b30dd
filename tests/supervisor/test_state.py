import asyncio
import errno
import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.security.credentials import Credentials
from pdserve.supervisor import state
from pdserve.supervisor.processes.alone import make_sockets_folder
from pdserve.supervisor.processes.guardian import began
from pdserve.util.errors import ConfigError
from tests.conditions import until

GRAPH = state.GraphRecord(
    os.getpid(), "/a/graph.yaml", "demo", "pdserve", "127.0.0.1:2379", "nats://127.0.0.1:4222"
)


FLOCK = fcntl.flock


def _flock_of_files(opened: int, how: int) -> None:
    """As on NFS, where no folder can be locked."""
    if stat.S_ISDIR(os.fstat(opened).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(opened, how)


@pytest.mark.parametrize("flock", [FLOCK, _flock_of_files], ids=["", "NFS"])
def test_a_second_graph_is_refused_also_without_the_lock_file_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: Callable[[int, int], None]
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    with state.locked(tmp_path) as folder:
        folder.fresh_credentials()
        folder.record(GRAPH)
        before = _content(tmp_path)
        for _ in range(2):
            _assert_refused(tmp_path, rf"Another graph runs on .* \(pid {os.getpid()}\)")
            (tmp_path / "lock").unlink()
            if flock is FLOCK:
                _assert_refused(tmp_path, "Another graph runs on")
            folder.mend()
            assert _content(tmp_path) == before
    with state.locked(tmp_path):
        pass


def _assert_refused(folder: Path, why: str) -> None:
    with pytest.raises(ConfigError, match=why), state.locked(folder):
        pass


def test_the_record_counts_as_long_as_the_graph_lives_and_it_is_whole(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        folder.record(GRAPH)
        assert state.read(tmp_path) == GRAPH
    assert state.read(tmp_path) is None
    dead = subprocess.Popen(["true"])
    dead.wait()
    state.write(tmp_path, replace(GRAPH, pid=dead.pid))
    assert state.read(tmp_path) is None
    state.write(tmp_path, replace(GRAPH, began=began(os.getpid())))
    assert state.read(tmp_path) is not None
    state.write(tmp_path, replace(GRAPH, began=1))
    assert state.read(tmp_path) is None, "the pid is another process's by now"
    for content in ("", "\0" * 100, "{}", "not json", '{"pid": "x"}'):
        (tmp_path / "graph.json").write_text(content)
        assert state.read(tmp_path) is None


def test_sockets_that_a_killed_graph_left_are_removed(tmp_path: Path) -> None:
    Path(make_sockets_folder(str(tmp_path)), "socket").touch()
    with state.locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(("mode", "locked"), [(0o755, 0o700), (0o1777, 0o1777)])
def test_no_other_user_can_hold_the_lock_of_a_folder_that_not_all_share(
    tmp_path: Path, mode: int, locked: int
) -> None:
    """What may read the folder could, also where it was there before."""
    (tmp_path / "lock").touch(0o644)
    tmp_path.chmod(mode)
    with state.locked(tmp_path):
        assert tmp_path.stat().st_mode & 0o7777 == locked
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_what_vanishes_of_the_folder_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each by itself, and all of it."""
    state_dir = tmp_path / "state"
    with state.locked(state_dir) as folder:
        credentials = folder.fresh_credentials()
        folder.record(GRAPH)
        before = _content(state_dir)
        for path in (credentials.folder, credentials.key, state_dir / "graph.json", state_dir):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            folder.mend()
            assert _content(state_dir) == before
            assert f"{path} had vanished" in caplog.text or path == credentials.folder
        assert Credentials.load(credentials.folder) == credentials
        assert {path.stat().st_mode & 0o077 for path in state_dir.rglob("*")} == {0}
        _assert_refused(state_dir, "Another graph runs on")
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
