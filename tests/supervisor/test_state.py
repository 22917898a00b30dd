import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.security.credentials import Credentials
from pdserve.supervisor import state
from pdserve.supervisor.processes.alone import make_sockets_folder
from pdserve.supervisor.processes.guardian import start_time
from pdserve.util.errors import ConfigError
from tests.conditions import until

GRAPH = state.GraphRecord(
    os.getpid(), "/a/graph.yaml", "demo", "pdserve", "127.0.0.1:2379", "nats://127.0.0.1:4222"
)


def test_a_second_graph_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        folder.fresh_credentials()
        folder.record(GRAPH)
        before = _content(tmp_path)
        _assert_refused(tmp_path, rf"Another graph runs on .* \(pid {os.getpid()}\)")
        (tmp_path / "lock").unlink()
        folder.restore()
        _assert_refused(tmp_path, rf"Another graph runs on .* \(pid {os.getpid()}\)")
        assert _content(tmp_path) == before
    with state.locked(tmp_path):
        pass


def _assert_refused(folder: Path, why: str) -> None:
    with pytest.raises(ConfigError, match=why), state.locked(folder):
        pass


def test_only_a_whole_record_of_a_running_supervisor_is_read(tmp_path: Path) -> None:
    with state.locked(tmp_path) as folder:
        folder.record(GRAPH)
        assert state.read(tmp_path) == GRAPH
    assert state.read(tmp_path) is None
    dead = subprocess.Popen(["true"])
    dead.wait()
    state.write(tmp_path, replace(GRAPH, pid=dead.pid))
    assert state.read(tmp_path) is None
    state.write(tmp_path, replace(GRAPH, began=start_time(os.getpid())))
    assert state.read(tmp_path) is not None
    state.write(tmp_path, replace(GRAPH, began=1))
    assert state.read(tmp_path) is None, "the pid is another process's by now"
    for content in ("", "\0" * 100, "{}", "not json", '{"pid": "x"}'):
        (tmp_path / "graph.json").write_text(content)
        assert state.read(tmp_path) is None


def test_sockets_of_a_killed_graph_are_removed(tmp_path: Path) -> None:
    Path(make_sockets_folder(str(tmp_path)), "socket").touch()
    with state.locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(("mode", "locked"), [(0o755, 0o700), (0o1777, 0o1777)])
def test_other_users_cannot_open_the_lock_file(tmp_path: Path, mode: int, locked: int) -> None:
    """The folder is made private, unless it is shared by all users."""
    tmp_path.chmod(mode)
    with state.locked(tmp_path):
        assert tmp_path.stat().st_mode & 0o7777 == locked
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_removed_or_changed_files_are_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state_dir = tmp_path / "state"
    with state.locked(state_dir) as folder:
        credentials = folder.fresh_credentials()
        folder.record(GRAPH)
        before = _content(state_dir)
        for path in (credentials.folder, credentials.key, state_dir / "graph.json", state_dir):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            folder.restore()
            assert _content(state_dir) == before
            assert "recreated missing" in caplog.text
            caplog.clear()
        assert Credentials.load(credentials.folder) == credentials
        assert {path.stat().st_mode & 0o077 for path in state_dir.rglob("*")} == {0}
        _assert_refused(state_dir, "Another graph runs on")
        (state_dir / "graph.json").write_text("not ours")
        folder.restore()
        assert state.read(state_dir) == GRAPH


async def test_a_failing_restore_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RESTORE_INTERVAL", 0.01)
    with state.locked(tmp_path) as folder:
        credentials = folder.fresh_credentials()
        shutil.rmtree(credentials.folder)
        credentials.folder.write_text("in the way")
        restoring = asyncio.create_task(folder.keep_restored())
        await until(lambda: "cannot restore" in caplog.text)
        credentials.folder.unlink()
        await until(credentials.key.exists)
        restoring.cancel()
    assert caplog.text.count("cannot restore") == 1


def test_another_graph_in_a_folder_of_the_same_name_is_spared(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with state.locked(state_dir) as first:
        first.record(GRAPH)
        shutil.rmtree(state_dir)
        with state.locked(state_dir) as second:
            second.record(GRAPH)
            second.fresh_credentials()
            before = _content(state_dir)
            with pytest.raises(ConfigError, match="another graph runs there now"):
                first.restore()
            first.leave()
            assert _content(state_dir) == before


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
