"""Files and batches of all API keys: one SQLite database, where each line of a file is a row. All functions block.

Each transaction opens a connection of its own. The journal is no WAL, because a WAL works only within one host.
`records.left` is what is left of an open batch's window, in seconds. It is counted down, because clocks may be set.
"""

import errno
import logging
import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from pdserve.frontend.edge.body import check_parts
from pdserve.frontend.edge.response import HttpError
from pdserve.util import clock
from pdserve.util.errors import BadRequest, PdserveError

logger = logging.getLogger(__name__)

MAX_FILES, MAX_STORED = 1000, 10 << 30
"""Limits of an API key: number of files, and total of their bytes above which it gets no new file or batch."""
MAX_OPEN = 100
"""Maximum of open batches of an API key."""
MAX_CLOSED = 1000
"""Closed batches kept for an API key; older ones are deleted."""
MAX_LINE, MAX_LINES = 4 << 20, 50_000
"""Maximum of bytes in a line, and of lines in a batch."""
MAX_ERRORS = 100
"""Maximum of errors listed for a batch's input."""
WINDOW = 24 * 3600.0
"""Completion window of a batch, in seconds."""
BUSY_TIMEOUT = 30.0
"""Seconds that a transaction waits for the database's lock."""
READ_SIZE = 1 << 20
"""Bytes of a file that are read at a time."""
VERSION = 1
SCHEMA = (
    "PRAGMA auto_vacuum = INCREMENTAL",
    "BEGIN IMMEDIATE",
    "CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, object TEXT NOT NULL,"
    " owner TEXT NOT NULL, left REAL, record BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS of_owner ON records (owner, object)",
    "CREATE INDEX IF NOT EXISTS open ON records (seq) WHERE left IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS lines (file TEXT, line INTEGER, text BLOB NOT NULL, PRIMARY KEY (file, line))",
    f"PRAGMA user_version = {VERSION}",
    "COMMIT",
)
SETTINGS = ("journal_mode = PERSIST", f"journal_size_limit = {1 << 20}", "synchronous = FULL")
"""The journal keeps its space, so that batches can be cancelled and files deleted on a full disk."""
REFUSALS = {
    sqlite3.SQLITE_FULL: (507, "no space is left on the disk for files and batches"),
    sqlite3.SQLITE_BUSY: (503, "the database of batches is busy"),
    sqlite3.SQLITE_CORRUPT: (503, "the database of batches was damaged"),
}
OPEN = ("validating", "in_progress", "cancelling")
TIMES = ("in_progress_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")

Record = dict[str, Any]
"""A file or a batch as clients see it."""


class Line(msgspec.Struct):
    """A request of a batch's input. Its body is any JSON object, sent unchanged but for `service_tier`."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: object = None


def parse(text: bytes, endpoint: str) -> Line:
    """Raises ValueError with a code and a message."""
    try:
        if len(text) > MAX_LINE:
            raise BadRequest(f"the line is longer than {MAX_LINE} bytes")
        check_parts(text)
        line = msgspec.json.decode(text.decode(), type=Line)
        stream = msgspec.json.decode(line.body, type=_Body).stream
    except (ValueError, RecursionError, BadRequest) as error:
        raise ValueError("invalid_json_line", str(error)) from None
    if line.url != endpoint:
        raise ValueError("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}")
    if stream:
        raise ValueError("invalid_request", "a response in a batch cannot be a stream")
    return line


def result_files(batch: Record) -> dict[str, str]:
    """The ids of the batch's output and error file, by the name of the count in `request_counts`."""
    name = batch["id"].removeprefix("batch_")
    return {"completed": f"file-{name}-output", "failed": f"file-{name}-error"}


class Transaction(sqlite3.Connection):
    def all(self, kind: str, owner: str) -> list[Record]:
        """The newest first."""
        query = "SELECT record FROM records WHERE owner = ? AND object = ? ORDER BY seq DESC"
        return [msgspec.json.decode(row) for (row,) in self.execute(query, (owner, kind))]

    def find(self, kind: str, owner: str, record_id: str) -> Record:
        query = "SELECT record FROM records WHERE id = ? AND object = ? AND owner = ?"
        for (row,) in self.execute(query, (record_id, kind, owner)):
            return msgspec.json.decode(row, type=Record)
        raise HttpError(404, f"there is no {kind} of this id", "id")

    def add(self, owner: str, record: Record, left: float | None = None) -> Record:
        row = record["id"], record["object"], owner, left, msgspec.json.encode(record)
        self.execute("INSERT INTO records (id, object, owner, left, record) VALUES (?, ?, ?, ?, ?)", row)
        return record

    def add_file(self, owner: str, file_id: str, filename: str, size: int, purpose: str) -> Record:
        file = {"id": file_id, "object": "file", "bytes": size, "created_at": int(clock.unix())}
        return self.add(owner, file | {"filename": filename, "purpose": purpose, "status": "processed"})

    def update(self, batch: Record) -> Record:
        self.execute("UPDATE records SET record = ? WHERE id = ?", (msgspec.json.encode(batch), batch["id"]))
        return batch

    def set_status(self, batch: Record, status: str) -> Record:
        if status != "in_progress":
            left = 0.0 if status in OPEN else None
            self.execute("UPDATE records SET left = ? WHERE id = ?", (left, batch["id"]))
        return self.update(batch | {"status": status, f"{status}_at": int(clock.unix())})

    def check_space(self, owner: str, more: int) -> None:
        files = self.all("file", owner)
        size = sum(file["bytes"] for file in files)
        if len(files) + more > MAX_FILES or size > MAX_STORED:
            raise HttpError(400, f"there are {len(files)} files with {size} bytes: delete some")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        self.lock = folder / "lock"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    # for clients

    def get(self, kind: str, owner: str, record_id: str) -> Record:
        with self._transaction() as db:
            return db.find(kind, owner, record_id)

    def all(self, kind: str, owner: str) -> list[Record]:
        with self._transaction() as db:
            return db.all(kind, owner)

    def lines(self, file_id: str) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the lines of a file with their numbers, about `READ_SIZE` bytes at a time."""
        part = [(-1, b"")]
        while part:
            (last, _), part, size = part[-1], [], 0
            with self._transaction() as db:
                query = "SELECT line, text FROM lines WHERE file = ? AND line > ? ORDER BY line"
                for row in db.execute(query, (file_id, last)):
                    part.append(row)
                    if (size := size + len(row[1])) >= READ_SIZE:
                        break
            yield part

    def upload(self, owner: str, filename: str, content: IO[bytes]) -> Record:
        with self._transaction("IMMEDIATE") as db:
            db.check_space(owner, 1)
            file_id, texts = f"file-{uuid.uuid4().hex}", iter(partial(content.readline, MAX_LINE + 1), b"")
            rows = ((file_id, line, text) for line, text in enumerate(texts, 1))
            db.executemany("INSERT INTO lines VALUES (?, ?, ?)", rows)
            return db.add_file(owner, file_id, filename, content.tell(), "batch")

    def delete(self, owner: str, file_id: str) -> Record:
        with self._transaction("IMMEDIATE") as db:
            db.find("file", owner, file_id)
            for batch in db.all("batch", owner):
                if batch["status"] in OPEN and batch["input_file_id"] == file_id:
                    raise HttpError(400, f"{batch['id']} ({batch['status']}) reads it: cancel it first")
            db.execute("DELETE FROM lines WHERE file = ?", (file_id,))
            db.execute("DELETE FROM records WHERE id = ?", (file_id,))
            return {"id": file_id, "object": "file", "deleted": True}

    def create(self, owner: str, wanted: Record) -> Record:
        with self._transaction("IMMEDIATE") as db:
            if wanted["input_file_id"] not in (file["id"] for file in db.all("file", owner)):
                raise HttpError(400, "there is no file of this id", "input_file_id")
            db.check_space(owner, 0)
            batches = db.all("batch", owner)
            closed = [(batch["id"],) for batch in batches if batch["status"] not in OPEN]
            if len(batches) - len(closed) >= MAX_OPEN:
                raise HttpError(429, f"this API key has {MAX_OPEN} open batches", retry_after=60.0)
            db.executemany("DELETE FROM records WHERE id = ?", closed[MAX_CLOSED:])
            created = int(clock.unix())
            batch = {"id": f"batch_{uuid.uuid4().hex}", "object": "batch", "status": "validating", **wanted}
            batch |= {"created_at": created, "expires_at": created + int(WINDOW)}
            batch |= dict.fromkeys(("errors", "output_file_id", "error_file_id", *TIMES))
            batch["request_counts"] = dict.fromkeys(("total", "completed", "failed"), 0)
            return db.add(owner, batch, WINDOW)

    def cancel(self, owner: str, batch_id: str) -> Record:
        with self._transaction("IMMEDIATE") as db:
            batch = db.find("batch", owner, batch_id)
            if batch["status"] not in OPEN:
                raise HttpError(400, f"the batch is {batch['status']}")
            return db.set_status(batch, "cancelling")

    # for the frontend that runs batches

    def count_down(self, seconds: float) -> None:
        """Take `seconds` off the window of each open batch, and return free pages to the file system."""
        with self._transaction("IMMEDIATE") as db:
            db.execute("UPDATE records SET left = left - ? WHERE left > 0", (seconds,))
            db.executescript("PRAGMA incremental_vacuum(10000)")  # at most 10,000 pages

    def open_batches(self) -> list[tuple[str, str, float]]:
        """Owner, id and seconds left of each, the oldest first."""
        with self._transaction() as db:
            query = "SELECT owner, id, left FROM records WHERE left IS NOT NULL ORDER BY seq"
            return db.execute(query).fetchall()

    def begin(self, owner: str, batch_id: str) -> tuple[Record, set[int]]:
        """Validate the input of a new batch; wrong input fails the batch. Return the batch and the numbers of its
        lines that have results."""
        checked = self._check(self.get("batch", owner, batch_id))
        with self._transaction("IMMEDIATE") as db:
            batch = db.find("batch", owner, batch_id)
            if batch["status"] == "validating":
                batch = db.set_status(batch | checked, "failed" if checked["errors"] else "in_progress")
            query = "SELECT line FROM lines WHERE file IN (?, ?)"
            return batch, {line for (line,) in db.execute(query, tuple(result_files(batch).values()))}

    def append(
        self, owner: str, batch_id: str, results: Sequence[tuple[str, int, bytes]]
    ) -> tuple[Record, float]:
        """Add results: (name of the count, line number, text). Return the batch and the seconds left of its window."""
        with self._transaction("IMMEDIATE") as db:
            batch = db.find("batch", owner, batch_id)
            for count, line, text in results:
                db.execute("INSERT INTO lines VALUES (?, ?, ?)", (result_files(batch)[count], line, text))
                batch["request_counts"][count] += 1
            if results:
                db.update(batch)
            (left,) = db.execute("SELECT left FROM records WHERE id = ?", (batch_id,)).fetchone()
            return batch, left

    def close(self, owner: str, batch_id: str, status: str) -> None:
        """End the batch, and show its client the files with results."""
        with self._transaction("IMMEDIATE") as db:
            batch = db.find("batch", owner, batch_id)
            for file_id in result_files(batch).values():
                query = "SELECT sum(length(text)) FROM lines WHERE file = ?"
                (size,) = db.execute(query, (file_id,)).fetchone()
                if size:
                    kind = file_id.rpartition("-")[2]
                    db.add_file(owner, file_id, f"{batch_id}_{kind}.jsonl", size, "batch_output")
                    batch[f"{kind}_file_id"] = file_id
            db.set_status(batch, status)

    def _check(self, batch: Record) -> Record:
        """Validate the input of a new batch. Return its errors and the number of its requests."""
        errors, ids = list[Record](), set[str]()
        for part in self.lines(batch["input_file_id"]) if batch["status"] == "validating" else ():
            for number, text in part:
                try:
                    line = parse(text, batch["endpoint"])
                    if not line.custom_id or line.custom_id in ids:
                        raise ValueError("duplicate_custom_id", "each line needs a custom_id of its own")
                    ids.add(line.custom_id)
                except ValueError as error:
                    code, message = error.args
                    errors.append(_error(code, message, number))
            if len(errors) >= MAX_ERRORS or len(ids) > MAX_LINES:
                break
        if not errors and not 0 < len(ids) <= MAX_LINES:
            errors.append(_error("invalid_input_file", f"the input file needs 1 to {MAX_LINES} requests"))
        listed = {"object": "list", "data": errors[:MAX_ERRORS]} if errors else None
        return {"errors": listed, "request_counts": {"total": len(ids), "completed": 0, "failed": 0}}

    # the database

    @contextmanager
    def _transaction(self, mode: Literal["DEFERRED", "IMMEDIATE"] = "DEFERRED") -> Iterator[Transaction]:
        """Only one IMMEDIATE transaction runs at a time. Raises HttpError of `REFUSALS`. A damaged database is moved
        aside, and the next transaction makes a new one."""
        inode, path = 0, self._data / "batches.db"
        try:
            self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
            inode = self._data.stat().st_ino
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            connection = sqlite3.connect(path, BUSY_TIMEOUT, isolation_level=None, factory=Transaction)
            with closing(connection) as db:
                for setting in SETTINGS:
                    db.execute(f"PRAGMA {setting}")
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > VERSION:
                    raise PdserveError(f"{path} has version {version}; this pdserve reads {VERSION}")
                for statement in SCHEMA if version < VERSION else ():
                    db.execute(statement)
                db.execute(f"BEGIN {mode}")
                with db:
                    yield db
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            if (refusal := refused(error)) is None:
                raise
            if refusal.args == REFUSALS[sqlite3.SQLITE_CORRUPT][1:]:
                aside = self.folder / f"damaged-{inode}"
                with suppress(OSError):  # another process was first
                    self._data.rename(aside)
                    logger.error(
                        "the database of batches is damaged (%s): moved to %s; starting anew", error, aside
                    )
            raise refusal from None


def _error(code: str, message: str, line: int | None = None) -> Record:
    return {"code": code, "message": message, "line": line, "param": None}


def refused(error: Exception) -> HttpError | None:
    """Return the response to an error of the disk or the database; None for another error."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        code = sqlite3.SQLITE_FULL
    if code == sqlite3.SQLITE_NOTADB or isinstance(error, msgspec.DecodeError):
        code = sqlite3.SQLITE_CORRUPT
    return HttpError(*REFUSALS[code], retry_after=5.0) if code in REFUSALS else None
