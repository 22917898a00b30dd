"""The state directory: its lock, which one graph holds at a time, what that graph needs of it, and the record by which
commands find the graph."""

import asyncio
import contextlib
import errno
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
from pdserve.supervisor.processes.exits import family
from pdserve.supervisor.processes.guardian import alive, began, groups_of, stop_in_waves
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

KNOWN_EVERY = 1.0
"""seconds between two writings of what is registered, at least"""
LOOK_EVERY = 0.5
"""seconds between two looks at what the graph needs of the folder: less than a restart waits"""
_LOCK, _RECORD, _KNOWN, _CREDENTIALS = "lock", "graph.json", "known.json", "credentials"


class GraphRecord(msgspec.Struct, frozen=True):
    """A running graph: `graph.json` in its state directory, for `pdserve status` and other commands."""

    pid: int
    """of its supervisor"""
    config: str
    model: str
    namespace: str
    etcd: str
    nats: str
    url: str = ""
    """of its frontends; empty without any"""
    credentials: str = ""
    """folder; empty without any"""
    down: dict[str, str] = {}
    """by its own server (`nats`, `etcd`) that has ended: how; empty: it is ready again"""
    began: int = 0
    """start time of the supervisor: after a power cut its pid may be another process's; 0: unknown"""

    def load_credentials(self) -> Credentials | None:
        """Raises ConfigError."""
        return Credentials.load(Path(self.credentials) if self.credentials else None)

    def serving(self, config: Config) -> Config:
        """The configuration with this graph's servers and credentials where it names none."""
        folder = Path(self.credentials) if self.credentials else None
        security = replace(config.security, credentials=config.security.credentials or folder)
        return replace(
            config, nats=config.nats or self.nats, etcd=config.etcd or self.etcd, security=security
        )


@contextlib.contextmanager
def locked(state_dir: Path, patience: float = 0.0) -> Iterator["StateFolder"]:
    """Lock the state directory. Raises ConfigError where another graph holds it, or it cannot be written. Where a
    guardian still stops the graph of a killed supervisor, wait for it; where that was killed too, stop what is left of
    the graph, with `patience` seconds for each wave of roles."""
    try:
        folder = StateFolder(state_dir, _until_locked(state_dir))
    except OSError as error:
        raise _unusable(state_dir, error) from error
    try:
        _stop_leftovers(*_holder(state_dir), patience)
        for sockets in state_dir.glob("sockets-*"):
            shutil.rmtree(sockets, ignore_errors=True)
        folder.mend()
        yield folder
    finally:
        folder.leave()
        os.close(folder.lock)


class StateFolder:
    """The state directory, locked for the graph that runs on it.

    What the graph needs there may vanish, as by a `rm -r` or a cleaner of /tmp. Processes that are started again, and
    other commands, need it as it was: so it is remembered here, looked at again and again, and made anew."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        """a file descriptor, which the guardian inherits, so that the lock is held until both have ended"""
        self.run = secrets.token_hex(8)
        """marks the processes of this graph, until the next one (see `guardian.groups_of`)"""
        self._files: dict[Path, bytes] = {}
        self._graph: GraphRecord | None = None
        self._problem = ""

    def fresh_credentials(self) -> Credentials:
        """Make credentials for this run of the graph. Raises ConfigError where they cannot be written."""
        try:
            made = create(self.path / _CREDENTIALS, valid=None)
            paths = (made.authority, made.certificate, made.key)
            self._files |= {path: path.read_bytes() for path in paths}
        except OSError as error:
            raise _unusable(self.path, error) from error
        return made

    def record(self, graph: GraphRecord) -> None:
        """Write the record. Raises ConfigError."""
        self._graph = graph
        self._files[self.path / _RECORD] = write(self.path, graph)

    def server_changed(self, name: str, how: str) -> None:
        """Add to the record's `down`."""
        if self._graph:
            self._graph = msgspec.structs.replace(self._graph, down=self._graph.down | {name: how})
            self.keep(_RECORD, msgspec.json.encode(self._graph))

    def keep(self, name: str, data: bytes) -> None:
        """Write a file that stays; where that fails, `mend` tries again."""
        self._files[self.path / name] = data
        with contextlib.suppress(OSError):
            _write(self.path / name, data)

    async def look_after(self) -> None:
        """Mend the folder again and again; never returns."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            problem = ""
            try:
                self.mend()
            except (OSError, ConfigError) as error:
                problem = str(error)
            if problem and problem != self._problem:
                logger.error("what the graph needs of %s cannot be made anew: %s", self.path, problem)
            self._problem = problem

    def mend(self) -> None:
        """Make anew what has vanished or changed since it was written. Raises OSError, and ConfigError where another
        graph has taken the place of a folder that was removed."""
        if not self._ours():
            self._lock_again()
        _note_run(self.path / _LOCK, f"{os.getpid()} {self.run}")
        for path, data in self._files.items():
            if not _holds(path, data):
                make_private(path.parent)
                _write(path, data)
                logger.warning("%s had vanished or changed: written again", path)

    async def keep_known(self, view: RegistryView) -> None:
        """Write down what is registered, for commands while etcd does not answer; never returns."""
        async for _ in view.changes():
            with contextlib.suppress(OSError):  # the next change writes it again
                await asyncio.to_thread(_write, self.path / _KNOWN, msgspec.json.encode(view.snapshot()))
            await asyncio.sleep(KNOWN_EVERY)

    def leave(self) -> None:
        """Remove the record, if the folder is still this graph's."""
        self._files.clear()
        if self._ours():
            for name in (_RECORD, _KNOWN):
                (self.path / name).unlink(missing_ok=True)

    def _ours(self) -> bool:
        """Whether the folder is the one that was locked."""
        held = os.fstat(self.lock)
        for path in (self.path, self.path / _LOCK):
            with contextlib.suppress(OSError):
                if os.path.samestat(held, path.stat()):
                    return True
        return False

    def _lock_again(self) -> None:
        if (lock := _try_lock_folder(self.path)) is None:
            raise ConfigError([f"{self.path} was removed, and another graph runs there now."])
        os.dup2(lock, self.lock, inheritable=False)
        os.close(lock)
        logger.warning("%s had vanished: made anew", self.path)


def _until_locked(state_dir: Path) -> int:
    waiting = False
    while (lock := _try_lock_folder(state_dir)) is None:
        pid, _ = _holder(state_dir)
        if not pid or alive(pid):
            raise ConfigError(
                [
                    f"Another graph runs on {state_dir} (pid {pid or 'unknown'}): stop it, or give this one a "
                    "folder of its own (Graph: state-dir)."
                ]
            )
        if not waiting:
            logger.warning(
                "waiting for the graph on %s to end: its supervisor (pid %s) was killed", state_dir, pid
            )
        waiting = True
        time.sleep(0.1)
    return lock


def _try_lock_folder(path: Path) -> int | None:
    """Make and lock the folder itself, since any file in it may be removed; return the file descriptor, None where
    another process holds it. Raises OSError."""
    make_private(path)
    for name, flags in ((path, os.O_RDONLY), (path / _LOCK, os.O_RDWR | os.O_CREAT)):
        opened = os.open(name, flags, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            return None
        except OSError:  # NFS locks no folders, but files
            os.close(opened)
        else:
            return opened
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _holder(state_dir: Path) -> tuple[int, str]:
    """The pid of the supervisor that holds or held the lock, and its `run`; 0 and empty where they are not known."""
    with contextlib.suppress(OSError, ValueError):
        pid, run = (state_dir / _LOCK).read_text().split()
        return int(pid), run
    return 0, ""


def _note_run(path: Path, text: str) -> None:
    """Written in place: on NFS this file is the lock. The lock holds without the text, as on a full disk."""
    if not _holds(path, text.encode()):
        with contextlib.suppress(OSError), open(path, "w", opener=private) as file:
            file.write(text)


def _stop_leftovers(pid: int, run: str, patience: float) -> None:
    """Stop the processes of a graph whose supervisor and guardian have both been killed. Where the supervisor lives,
    this folder is a copy of its folder."""
    left = groups_of(run) if run else {}
    if left and not left.keys() & family(pid):
        logger.warning(
            "stopping what is left of a graph whose supervisor and guardian were killed (process groups %s)",
            ", ".join(map(str, left)),
        )
        stop_in_waves(left, patience)


def make_private(folder: Path) -> None:
    """Make a folder, which may exist, readable by this user alone, as far as it belongs to this user: files in it may
    hold prompts, and what can open it can hold its lock. One that all users share, as /tmp, stays as it is. Raises
    OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if mode & 0o077 and not mode & stat.S_ISVTX:
        with contextlib.suppress(PermissionError):
            folder.chmod(0o700)


def private(path: str, flags: int) -> int:
    """An `opener` that makes the file readable by this user alone, as far as the file system has modes: other users
    could hold a lock whose file they can read."""
    opened = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):
        os.fchmod(opened, 0o600)
    return opened


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
    return ConfigError(
        [f"The state directory {state_dir} cannot be written: {error.strerror or error} (Graph: state-dir)."]
    )


def write(state_dir: Path, graph: GraphRecord) -> bytes:
    """Write the record; return its text. Raises ConfigError where that fails; the record before it then stays."""
    data = msgspec.json.format(msgspec.json.encode(graph))
    try:
        _write(state_dir / _RECORD, data)
    except OSError as error:
        raise _unusable(state_dir, error) from error
    return data


def read(state_dir: Path) -> GraphRecord | None:
    """The graph that runs on this state directory; None where none does."""
    try:
        graph = msgspec.json.decode((state_dir / _RECORD).read_bytes(), type=GraphRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return graph if alive(graph.pid) and graph.began in (0, began(graph.pid)) else None


def read_known(state_dir: Path) -> Snapshot | None:
    """What the supervisor on this state directory last read in etcd."""
    try:
        return msgspec.json.decode((state_dir / _KNOWN).read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError):
        return None
