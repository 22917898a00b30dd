"""The state directory: its lock, which one graph holds at a time, and the record by which that graph is found."""

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
    """A running graph, as `graph.json` in its state directory tells it to `pdserve status` and the like."""

    pid: int
    """of its supervisor"""
    config: str
    model: str
    namespace: str
    etcd: str
    nats: str
    url: str = ""
    """of its frontend, empty where it has none"""
    credentials: str = ""
    """folder; empty where it has none"""

    def load_credentials(self) -> Credentials | None:
        """Raises ConfigError."""
        return Credentials.load(Path(self.credentials) if self.credentials else None)

    def serving(self, config: Config) -> Config:
        """A configuration with this graph's servers where it names none, and what they ask for."""
        folder = Path(self.credentials) if self.credentials else None
        security = replace(config.security, credentials=config.security.credentials or folder)
        return replace(
            config, nats=config.nats or self.nats, etcd=config.etcd or self.etcd, security=security
        )


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[int]:
    """Lock the state directory; yields the lock's file descriptor. Raises ConfigError where another graph holds it, or
    nothing can be written there. The lock ends with this process and with the guardian that inherits the descriptor:
    where a guardian still stops the graph of a killed supervisor, wait for it."""
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
    """Make a folder that this user alone can read, or make it so: what is in it may hold prompts. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def private(path: str, flags: int) -> int:
    """The `opener` of a file that this user alone can read, as far as the file system has modes: another that could
    read a lock could hold it."""
    opened = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):
        os.fchmod(opened, 0o600)
    return opened


def try_lock(lock: IO[str]) -> bool:
    """Lock an open file; when another process holds it, what that has noted can be read from the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return False
    return True


def note_holder(lock: IO[str], pid: int) -> None:
    """For error texts only; the lock holds without it, on a full disk for example."""
    with contextlib.suppress(OSError):
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), str(pid).encode())


@contextlib.contextmanager
def socket_folder(state_dir: Path) -> Iterator[Path]:
    """A folder for the sockets of this graph's engines, empty at the beginning and at the end: engines that are killed
    leave them behind. It is in the temporary folder, or in /tmp, where a socket's path (107 bytes at most) would become
    too long. Raises ConfigError where it cannot be used."""
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
    """Raises ConfigError where it is not ours: another user may have made it in a temporary folder."""
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
    """For one run of a graph. Raises ConfigError where they cannot be written."""
    try:
        return create(state_dir / _CREDENTIALS, valid=None)
    except OSError as error:
        raise _unusable(state_dir, error) from error


def write(state_dir: Path, graph: GraphRecord) -> None:
    """Raises ConfigError where it cannot be written; the record before it then stays whole."""
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
    """The graph that runs on this state directory, None where none does."""
    try:
        graph = msgspec.json.decode((state_dir / _RECORD).read_bytes(), type=GraphRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return graph if psutil.pid_exists(graph.pid) else None
