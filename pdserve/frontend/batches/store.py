"""Files and batches of all API keys: one SQLite database, where each line of a file is a row. All functions block.

A connection lasts for one transaction. The rollback journal works wherever file locks do; a WAL needs memory that is
shared within one host. `records.left` are the seconds of an open batch: counted down, because clocks may be set.
"""

import errno
import logging
import os
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

MAX_FILES, MAX_STORED, MAX_OPEN, MAX_CLOSED = 1000, 10 << 30, 100, 1000
"""of a key: files, their bytes, open batches, and closed ones, of which older ones are forgotten"""
MAX_LINE, MAX_LINES, MAX_ERRORS = 4 << 20, 50_000, 100
"""bytes of a line; lines of a batch; errors of its input that are listed"""
WINDOW = 24 * 3600.0
"""seconds for a batch"""
BUSY = 30.0
"""seconds that a transaction waits for others"""
PART = 1 << 20
"""bytes of a file that are read at a time"""
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
"""The space of the journal is kept: on a full disk, batches can still be cancelled and files deleted."""
REFUSALS = {
    sqlite3.SQLITE_FULL: (507, "no space is left on the disk for files and batches"),
    sqlite3.SQLITE_BUSY: (503, "the database of batches is busy"),
    sqlite3.SQLITE_CORRUPT: (503, "the database of batches was damaged"),
}
OPEN = ("validating", "in_progress", "cancelling")
LATER = ("in_progress_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")

Record = dict[str, Any]
"""A file or a batch as clients see it."""


class Line(msgspec.Struct):
    """A request of a batch's input. Its body is sent as it is, whatever JSON it holds."""

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
        raise ValueError("invalid_request", "an answer in a batch cannot be a stream")
    return line


def results_of(batch: Record) -> dict[str, str]:
    """The ids of the files of its results, by the names of their counts."""
    name = batch["id"].removeprefix("batch_")
    return {"completed": f"file-{name}-output", "failed": f"file-{name}-error"}


class Transaction(sqlite3.Connection):
    def all(self, kind: str, owner: str) -> list[Record]:
        """The newest first."""
        ask = "SELECT record FROM records WHERE owner = ? AND object = ? ORDER BY seq DESC"
        return [msgspec.json.decode(row) for (row,) in self.execute(ask, (owner, kind))]

    def find(self, kind: str, owner: str, record_id: str) -> Record:
        ask = "SELECT record FROM records WHERE id = ? AND object = ? AND owner = ?"
        for (row,) in self.execute(ask, (record_id, kind, owner)):
            return msgspec.json.decode(row, type=Record)
        raise HttpError(404, f"there is no {kind} of this id", "id")

    def left(self, batch: Record) -> float:
        return float(self.execute("SELECT left FROM records WHERE id = ?", (batch["id"],)).fetchone()[0])

    def save(self, owner: str, record: Record, left: float | None = None) -> Record:
        row = (record["id"], record["object"], owner, left, msgspec.json.encode(record))
        known = "ON CONFLICT (id) DO UPDATE SET left = excluded.left, record = excluded.record"
        self.execute(
            f"INSERT INTO records (id, object, owner, left, record) VALUES (?, ?, ?, ?, ?) {known}", row
        )
        return record

    def save_file(self, owner: str, file_id: str, filename: str, size: int, purpose: str) -> Record:
        file = {"id": file_id, "object": "file", "bytes": size, "created_at": int(clock.unix())}
        return self.save(owner, file | {"filename": filename, "purpose": purpose, "status": "processed"})

    def become(self, owner: str, batch: Record, status: str, left: float | None) -> Record:
        batch |= {"status": status, f"{status}_at": int(clock.unix())}
        return self.save(owner, batch, left)

    def check_space(self, owner: str, more: int) -> None:
        files = self.all("file", owner)
        if len(files) + more > MAX_FILES or sum(each["bytes"] for each in files) > MAX_STORED:
            raise HttpError(400, f"there are {len(files)} files: delete some")


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder, self._data, self.lock = folder, folder / "data", folder / "lock"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # for clients

    def get(self, kind: str, owner: str, record_id: str) -> Record:
        with self._transaction() as now:
            return now.find(kind, owner, record_id)

    def all(self, kind: str, owner: str) -> list[Record]:
        with self._transaction() as now:
            return now.all(kind, owner)

    def lines(self, file_id: str) -> Iterator[list[tuple[int, bytes]]]:
        """Yield the lines of a file with their numbers, some at a time."""
        part = [(-1, b"")]
        while part:
            (after, _), part, size = part[-1], [], 0
            with self._transaction() as now:
                ask = "SELECT line, text FROM lines WHERE file = ? AND line > ? ORDER BY line"
                for row in now.execute(ask, (file_id, after)):
                    part.append(row)
                    if (size := size + len(row[1])) >= PART:
                        break
            yield part

    def keep(self, owner: str, filename: str, content: IO[bytes]) -> Record:
        with self._transaction("IMMEDIATE") as now:
            now.check_space(owner, 1)
            name, texts = f"file-{uuid.uuid4().hex}", iter(partial(content.readline, MAX_LINE + 1), b"")
            rows = ((name, line, text) for line, text in enumerate(texts, 1))
            now.executemany("INSERT INTO lines VALUES (?, ?, ?)", rows)
            return now.save_file(owner, name, filename, content.tell(), "batch")

    def delete(self, owner: str, file_id: str) -> Record:
        with self._transaction("IMMEDIATE") as now:
            now.find("file", owner, file_id)
            for batch in now.all("batch", owner):
                if batch["status"] in OPEN and batch["input_file_id"] == file_id:
                    raise HttpError(
                        400, f"{batch['id']}, which is {batch['status']}, reads it: cancel it before"
                    )
            now.execute("DELETE FROM lines WHERE file = ?", (file_id,))
            now.execute("DELETE FROM records WHERE id = ?", (file_id,))
            return {"id": file_id, "object": "file", "deleted": True}

    def create(self, owner: str, asked: Record) -> Record:
        with self._transaction("IMMEDIATE") as now:
            if asked["input_file_id"] not in (file["id"] for file in now.all("file", owner)):
                raise HttpError(400, "there is no file of this id", "input_file_id")
            now.check_space(owner, 0)
            batches = now.all("batch", owner)
            closed = [(batch["id"],) for batch in batches if batch["status"] not in OPEN]
            if len(batches) - len(closed) >= MAX_OPEN:
                raise HttpError(429, f"{MAX_OPEN} batches of this key are not over", retry_after=60.0)
            now.executemany("DELETE FROM records WHERE id = ?", closed[MAX_CLOSED:])
            begun = int(clock.unix())
            batch = {"id": f"batch_{uuid.uuid4().hex}", "object": "batch", "status": "validating", **asked}
            batch |= {"created_at": begun, "expires_at": begun + int(WINDOW)}
            batch |= dict.fromkeys(("errors", "output_file_id", "error_file_id", *LATER))
            batch["request_counts"] = dict.fromkeys(("total", "completed", "failed"), 0)
            return now.save(owner, batch, WINDOW)

    def cancel(self, owner: str, batch_id: str) -> Record:
        with self._transaction("IMMEDIATE") as now:
            batch = now.find("batch", owner, batch_id)
            if batch["status"] not in OPEN:
                raise HttpError(400, f"the batch is {batch['status']}")
            return now.become(owner, batch, "cancelling", 0.0)

    # for the frontend that works

    def count_down(self, seconds: float) -> None:
        """Take `seconds` off each open batch, and give free space back to the disk."""
        with self._transaction("IMMEDIATE") as now:
            now.execute("UPDATE records SET left = left - ? WHERE left > 0", (seconds,))
            now.executescript("PRAGMA incremental_vacuum(10000)")  # pages

    def open_batches(self) -> list[tuple[str, str, float]]:
        """Return owner, id and seconds left of each, the oldest first."""
        with self._transaction() as now:
            ask = "SELECT owner, id, left FROM records WHERE left IS NOT NULL ORDER BY seq"
            return now.execute(ask).fetchall()

    def begin(self, owner: str, batch_id: str) -> tuple[Record, set[int]]:
        """Check the input of a new batch, which fails if it is wrong. Return the batch and its lines with results."""
        checked = self._check(self.get("batch", owner, batch_id))
        with self._transaction("IMMEDIATE") as now:
            batch = now.find("batch", owner, batch_id)
            if batch["status"] == "validating":
                batch |= checked
                failed = batch["errors"] is not None
                now.become(owner, batch, *(("failed", None) if failed else ("in_progress", now.left(batch))))
            ask = "SELECT line FROM lines WHERE file IN (?, ?)"
            return batch, {line for (line,) in now.execute(ask, tuple(results_of(batch).values()))}

    def append(
        self, owner: str, batch_id: str, results: Sequence[tuple[str, int, bytes]]
    ) -> tuple[Record, float]:
        """Add results: name of the count, line and content. Return the batch and the seconds that it has left."""
        with self._transaction("IMMEDIATE") as now:
            batch = now.find("batch", owner, batch_id)
            for count, line, text in results:
                now.execute("INSERT INTO lines VALUES (?, ?, ?)", (results_of(batch)[count], line, text))
                batch["request_counts"][count] += 1
            left = now.left(batch)
            return now.save(owner, batch, left) if results else batch, left

    def close(self, owner: str, batch_id: str, status: str) -> None:
        """End the batch; its client sees the files of its results."""
        with self._transaction("IMMEDIATE") as now:
            batch = now.find("batch", owner, batch_id)
            for file_id in results_of(batch).values():
                (size,) = now.execute(
                    "SELECT sum(length(text)) FROM lines WHERE file = ?", (file_id,)
                ).fetchone()
                if size:
                    kind = file_id.rpartition("-")[2]
                    now.save_file(owner, file_id, f"{batch_id}_{kind}.jsonl", size, "batch_output")
                    batch[f"{kind}_file_id"] = file_id
            now.become(owner, batch, status, None)

    def _check(self, batch: Record) -> Record:
        """Return what is to be known of its input: errors, and the number of its requests."""
        errors, ids = list[Record](), set[str]()
        for part in self.lines(batch["input_file_id"]) if batch["status"] == "validating" else ():
            for number, text in part:
                try:
                    line = parse(text, batch["endpoint"])
                    if not line.custom_id or line.custom_id in ids:
                        raise ValueError(
                            "duplicate_custom_id", "each line needs a custom_id that no other has"
                        )
                    ids.add(line.custom_id)
                except ValueError as error:
                    code, message = error.args
                    errors.append({"code": code, "message": message, "line": number, "param": None})
            if len(errors) >= MAX_ERRORS or len(ids) > MAX_LINES:
                break
        if not errors and not 0 < len(ids) <= MAX_LINES:
            message = f"the input file has to be there, with 1 to {MAX_LINES} requests"
            errors.append({"code": "invalid_input_file", "message": message, "line": None, "param": None})
        listed = {"object": "list", "data": errors[:MAX_ERRORS]} if errors else None
        return {"errors": listed, "request_counts": {"total": len(ids), "completed": 0, "failed": 0}}

    # the database

    @contextmanager
    def _transaction(self, mode: Literal["DEFERRED", "IMMEDIATE"] = "DEFERRED") -> Iterator[Transaction]:
        """IMMEDIATE ones exclude each other. Raises HttpError of `REFUSALS`. A damaged database is set aside."""
        inode, path = 0, self._data / "batches.db"
        try:
            self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
            inode = self._data.stat().st_ino
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            with closing(sqlite3.connect(path, BUSY, isolation_level=None, factory=Transaction)) as now:
                for setting in SETTINGS:
                    now.execute(f"PRAGMA {setting}")
                (version,) = now.execute("PRAGMA user_version").fetchone()
                if version > VERSION:
                    raise PdserveError(f"{path} has version {version}; this pdserve reads {VERSION}")
                if version < VERSION:
                    if list(self._folder.glob("*/batches")):
                        logger.warning("%s holds files of an older pdserve, which are not read", self._folder)
                    for statement in SCHEMA:
                        now.execute(statement)
                now.execute(f"BEGIN {mode}")
                with now:
                    yield now
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            if (refusal := refused(error)) is None:
                raise
            if refusal.args == REFUSALS[sqlite3.SQLITE_CORRUPT][1:]:
                aside = self._folder / f"damaged-{inode}"
                with suppress(OSError):  # another process was first
                    self._data.rename(aside)
                    logger.error(
                        "the database of batches is damaged (%s): moved to %s; starting anew", error, aside
                    )
            raise refusal from None


def refused(error: Exception) -> HttpError | None:
    """Return the answer for an error that is no fault of the request or the code."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        code = sqlite3.SQLITE_FULL
    if code == sqlite3.SQLITE_NOTADB or isinstance(error, msgspec.DecodeError):
        code = sqlite3.SQLITE_CORRUPT
    return HttpError(*REFUSALS[code], retry_after=5.0) if code in REFUSALS else None
