"""The state directory: its lock, which one graph holds at a time, and the record by which commands find that graph."""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec
import psutil

from pdserve.config.schema import Config
from pdserve.credentials import Credentials, create
from pdserve.errors import ConfigError
from pdserve.supervisor.guardian import alive

log = logging.getLogger(__name__)

_LOCK, _RECORD, _CREDENTIALS = "lock", "graph.json", "credentials"
_LONGEST_FOLDER = 107 - len("/123e4567-e89b-12d3-a456-426614174000")
"""bytes, before the names that vLLM gives its sockets"""


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
def locked(state_dir: Path) -> Iterator[int]:
    """Lock the state directory; yields the lock's file descriptor. Raises ConfigError where another graph holds it, or
    the directory cannot be written. The guardian inherits the descriptor, so that the lock is held until this process
    and the guardian have ended; where a guardian still stops the graph of a killed supervisor, wait for it."""
    waiting = False
    with _open_lock(state_dir) as lock:
        while not try_lock(lock):
            holder = lock.read()
            if not holder.isdecimal() or alive(int(holder)):
                raise ConfigError(
                    [
                        f"Another graph runs on {state_dir} (pid {holder or 'unknown'}): stop it, or give this one a "
                        "folder of its own (Graph: state-dir)."
                    ]
                )
            if not waiting:
                log.warning(
                    "waiting for the graph on %s to end: its supervisor (pid %s) was killed",
                    state_dir,
                    holder,
                )
            waiting = True
            time.sleep(0.1)
        note_holder(lock, os.getpid())
        try:
            yield lock.fileno()
        finally:
            (state_dir / _RECORD).unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder, which may exist, readable by this user alone: its files may hold prompts. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def private(path: str, flags: int) -> int:
    """An `opener` that makes the file readable by this user alone, as far as the file system has modes: other users
    could hold a lock whose file they can read."""
    opened = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):
        os.fchmod(opened, 0o600)
    return opened


def try_lock(lock: IO[str]) -> bool:
    """Lock an open file; false where another process holds it, whose pid can then be read from the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return False
    return True


def note_holder(lock: IO[str], pid: int) -> None:
    """Write the pid for the error texts of others; the lock holds without it, as on a full disk."""
    with contextlib.suppress(OSError):
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), str(pid).encode())


@contextlib.contextmanager
def socket_folder(state_dir: Path) -> Iterator[Path]:
    """Yield a folder for the sockets of this graph's engines, emptied before and after, since killed engines leave
    theirs behind. It is in the state directory, or in the temporary folder or /tmp where the path of a socket would
    exceed 107 bytes. Raises ConfigError where it cannot be used."""
    digest = hashlib.blake2s(os.fsencode(state_dir), digest_size=6).hexdigest()
    name = f"pdserve-{os.getuid()}-{digest}"
    folders = [state_dir / "sockets", Path(tempfile.gettempdir()) / name, Path("/tmp") / name]
    folder = next((path for path in folders if len(os.fsencode(path)) <= _LONGEST_FOLDER), folders[-1])
    _empty(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(ConfigError):
            _empty(folder)


def _empty(folder: Path) -> None:
    """Make or empty the folder. Raises ConfigError where another user made it, which is possible in /tmp."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder.lstat()
        if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.getuid():
            raise ConfigError(
                [f"{folder} belongs to another user: remove it, or set another state directory."]
            )
        for entry in folder.iterdir():
            entry.unlink()
    except OSError as error:
        raise _unusable(folder, error) from error


def _open_lock(state_dir: Path) -> IO[str]:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(state_dir / _LOCK, "a+", opener=private)
    except OSError as error:
        raise _unusable(state_dir, error) from error


def _unusable(state_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        [f"The state directory {state_dir} cannot be written: {error.strerror or error} (Graph: state-dir)."]
    )


def fresh_credentials(state_dir: Path) -> Credentials:
    """Make credentials for one run of a graph. Raises ConfigError where they cannot be written."""
    try:
        return create(state_dir / _CREDENTIALS, valid=None)
    except OSError as error:
        raise _unusable(state_dir, error) from error


def write(state_dir: Path, graph: GraphRecord) -> None:
    """Write the record. Raises ConfigError where that fails; the record before it then stays."""
    fresh = state_dir / f"{_RECORD}.new"
    try:
        fresh.touch(mode=0o600)  # a NATS URL may have a password in it
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(graph)))
        fresh.replace(state_dir / _RECORD)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise _unusable(state_dir, error) from error


def read(state_dir: Path) -> GraphRecord | None:
    """The graph that runs on this state directory; None where none does."""
    try:
        graph = msgspec.json.decode((state_dir / _RECORD).read_bytes(), type=GraphRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return graph if psutil.pid_exists(graph.pid) else None
