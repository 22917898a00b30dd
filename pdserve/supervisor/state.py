"""The state directory of `serve`: its lock, its files, and the record by which commands find the running graph."""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from pdserve.config.schema import Config
from pdserve.registry.view import RegistryView, Snapshot
from pdserve.security.credentials import Credentials, create
from pdserve.supervisor.processes.exits import process_tree
from pdserve.supervisor.processes.guardian import alive, groups_of, start_time, stop_in_waves
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL = 1.0
"""Seconds between two writes of the registry snapshot, at least."""
RESTORE_INTERVAL = 0.5
"""Seconds between two checks of the files: shorter than the delay before a restart, which may need them."""
_LOCK, _RECORD, _SNAPSHOT, _CREDENTIALS = "lock", "graph.json", "known.json", "credentials"


class GraphRecord(msgspec.Struct, frozen=True):
    """A running graph: `graph.json` in its state directory, for `pdserve status` and other commands."""

    pid: int
    """Of the supervisor."""
    config: str
    model: str
    namespace: str
    etcd: str
    nats: str
    url: str = ""
    """Of the frontends; empty without any."""
    credentials: str = ""
    """Folder; empty without any."""
    down: dict[str, str] = {}
    """Embedded server (`nats`, `etcd`) -> how it ended; empty once it is ready again."""
    began: int = 0
    """Start time of the supervisor, since its pid may be another process's after a power cut; 0: unknown."""

    def load_credentials(self) -> Credentials | None:
        """Raises ConfigError."""
        return Credentials.load(Path(self.credentials) if self.credentials else None)

    def serving(self, config: Config) -> Config:
        """The configuration with this graph's NATS, etcd and credentials in place of those that it does not name."""
        folder = Path(self.credentials) if self.credentials else None
        security = replace(config.security, credentials=config.security.credentials or folder)
        return replace(
            config, nats=config.nats or self.nats, etcd=config.etcd or self.etcd, security=security
        )


@contextlib.contextmanager
def locked(state_dir: Path, patience: float = 0.0) -> Iterator["StateFolder"]:
    """Lock the state directory. If its last supervisor was killed, wait until its guardian has stopped the graph; if
    the guardian was killed too, stop the leftover processes, each wave of roles with `patience` seconds. Raises
    ConfigError if another graph holds the lock, or the directory cannot be written."""
    try:
        folder = StateFolder(state_dir, _wait_for_lock(state_dir))
    except OSError as error:
        raise _unusable(state_dir, error) from error
    try:
        _stop_leftovers(*_holder(state_dir), patience)
        for sockets in state_dir.glob("sockets-*"):
            shutil.rmtree(sockets, ignore_errors=True)
        folder.restore()
        yield folder
    finally:
        folder.leave()
        os.close(folder.lock)


class StateFolder:
    """The locked state directory of a running graph. Files that restarts and commands need are kept in memory too, and
    written again when something (`rm -r`, a cleaner of /tmp) removes or changes them."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        """Descriptor of the lock file. The guardian inherits it: the lock is held until supervisor and guardian end."""
        self.run = secrets.token_hex(8)
        """Mark of this graph's processes, which a later `serve` reads to find leftovers (`guardian.groups_of`)."""
        self._files: dict[Path, bytes] = {}
        self._graph: GraphRecord | None = None
        self._problem = ""

    def fresh_credentials(self) -> Credentials:
        """Make credentials for this run of the graph. Raises ConfigError if they cannot be written."""
        try:
            made = create(self.path / _CREDENTIALS, valid=None)
            paths = (made.authority, made.certificate, made.key)
            self._files |= {path: path.read_bytes() for path in paths}
        except OSError as error:
            raise _unusable(self.path, error) from error
        return made

    def record(self, graph: GraphRecord) -> None:
        """Write the record. Raises ConfigError if that fails; the previous record then stays."""
        self._graph = graph
        self._files[self.path / _RECORD] = write(self.path, graph)

    def server_changed(self, name: str, how: str) -> None:
        """Record in `down` how a server ended; empty: it is ready again."""
        if self._graph:
            self._graph = msgspec.structs.replace(self._graph, down=self._graph.down | {name: how})
            self.keep(_RECORD, msgspec.json.encode(self._graph))

    def keep(self, name: str, data: bytes) -> None:
        """Write a file. `restore` writes it again if it is lost, or could not be written."""
        self._files[self.path / name] = data
        with contextlib.suppress(OSError):
            _write(self.path / name, data)

    async def keep_restored(self) -> None:
        """Call `restore` again and again; never returns. Log each new problem."""
        while True:
            await asyncio.sleep(RESTORE_INTERVAL)
            problem = ""
            try:
                self.restore()
            except (OSError, ConfigError) as error:
                problem = str(error)
            if problem and problem != self._problem:
                logger.error("cannot restore the graph's files in %s, trying again: %s", self.path, problem)
            self._problem = problem

    def restore(self) -> None:
        """Make the folder and lock again if they are missing, and write missing or changed files again. Raises
        OSError, and ConfigError if another graph has locked a new folder of this name."""
        if not self._holds_lock():
            if (lock := _try_lock(self.path)) is None:
                raise ConfigError([f"{self.path} was removed, and another graph runs there now."])
            os.dup2(lock, self.lock, inheritable=False)
            os.close(lock)
            logger.warning("recreated missing %s", self.path / _LOCK)
        _note_run(self.path / _LOCK, f"{os.getpid()} {self.run}")
        for path, data in self._files.items():
            if not _holds(path, data):
                make_private(path.parent)
                _write(path, data)
                logger.warning("recreated missing or changed %s", path)

    async def keep_snapshot(self, view: RegistryView) -> None:
        """Write what is registered, for commands that run while etcd does not answer; never returns."""
        async for _ in view.changes():
            with contextlib.suppress(OSError):  # the next change writes it again
                await asyncio.to_thread(_write, self.path / _SNAPSHOT, msgspec.json.encode(view.snapshot()))
            await asyncio.sleep(SNAPSHOT_INTERVAL)

    def leave(self) -> None:
        """Remove record and snapshot, if the folder is still this graph's."""
        if self._holds_lock():
            for name in (_RECORD, _SNAPSHOT):
                (self.path / name).unlink(missing_ok=True)

    def _holds_lock(self) -> bool:
        """Whether the lock file is still the one that was locked."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self.lock), (self.path / _LOCK).stat())
        return False


def _wait_for_lock(state_dir: Path) -> int:
    """Return the descriptor of the locked file. Raises ConfigError if a running supervisor holds the lock."""
    warned = False
    while (lock := _try_lock(state_dir)) is None:
        pid, _ = _holder(state_dir)
        if not pid or alive(pid):
            raise ConfigError(
                [
                    f"Another graph runs on {state_dir} (pid {pid or 'unknown'}): stop it, or give this one a "
                    "Graph.state-dir of its own."
                ]
            )
        if not warned:
            logger.warning(
                "waiting for the graph on %s to end: its supervisor (pid %s) was killed", state_dir, pid
            )
        warned = True
        time.sleep(0.1)
    return lock


def _try_lock(state_dir: Path) -> int | None:
    """Make the folder and its lock file, and lock the file; None if another process holds the lock. Raises OSError."""
    make_private(state_dir)
    lock = os.open(state_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock


def _holder(state_dir: Path) -> tuple[int, str]:
    """The pid of the supervisor that holds or held the lock, and its `run`; 0 and empty if unknown."""
    with contextlib.suppress(OSError, ValueError):
        pid, run = (state_dir / _LOCK).read_text().split()
        return int(pid), run
    return 0, ""


def _note_run(lock: Path, text: str) -> None:
    """Write the holder into the lock file, in place. The lock works without this text, for example on a full disk."""
    if not _holds(lock, text.encode()):
        with contextlib.suppress(OSError):
            lock.write_text(text)


def _stop_leftovers(pid: int, run: str, patience: float) -> None:
    """Stop the processes of a graph whose supervisor and guardian were both killed. If the supervisor runs, this folder
    is a copy of its folder, and its processes are left alone."""
    left = groups_of(run) if run else {}
    if left and not left.keys() & process_tree(pid):
        logger.warning(
            "stopping leftover processes of a graph whose supervisor and guardian were killed (process groups %s)",
            ", ".join(map(str, left)),
        )
        stop_in_waves(left, patience)


def make_private(folder: Path) -> None:
    """Make a folder, and keep other users out of it: its files may hold prompts, and every user that can open the lock
    file can lock it. A folder that all users share (/tmp), or another user's, stays as it is. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if mode & 0o077 and not mode & stat.S_ISVTX:
        with contextlib.suppress(PermissionError):
            folder.chmod(0o700)


def private(path: str, flags: int) -> int:
    """An `opener` for new files that only this user can read."""
    return os.open(path, flags, 0o600)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _write(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, whole or not at all, also after a power cut. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with open(fresh, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def _unusable(state_dir: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(
        [f"The state directory {state_dir} cannot be written: {why}. Set another Graph.state-dir."]
    )


def write(state_dir: Path, graph: GraphRecord) -> bytes:
    """Write the record, and return its text. Raises ConfigError if that fails; the previous record then stays."""
    data = msgspec.json.format(msgspec.json.encode(graph))
    try:
        _write(state_dir / _RECORD, data)
    except OSError as error:
        raise _unusable(state_dir, error) from error
    return data


def read(state_dir: Path) -> GraphRecord | None:
    """The graph that runs on this state directory; None if none does."""
    try:
        graph = msgspec.json.decode((state_dir / _RECORD).read_bytes(), type=GraphRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return graph if alive(graph.pid) and graph.began in (0, start_time(graph.pid)) else None


def read_snapshot(state_dir: Path) -> Snapshot | None:
    """The registry snapshot that the supervisor on this state directory wrote last."""
    try:
        return msgspec.json.decode((state_dir / _SNAPSHOT).read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError):
        return None
