"""The folder of files and batches: JSON and JSONL, with a folder for each API key. All functions block.

`files/ID` is a file and `files/ID.json` its record, `batches/ID.json` the record of a batch, and `batches/ID.cancel`
says that it is to be cancelled. A record is replaced as a whole, and is on the disk before a client sees it. Every
frontend reads all of it and makes records; only the one that holds the lock changes batches and appends to their
results.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from pdserve import clock
from pdserve.errors import BadRequest
from pdserve.frontend.edge.body import check_parts

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}(-output|-errors)?")
_NOBODY = "_"
"""the folder where there are no keys; the names of keys begin with a letter or digit"""
MAX_LINE = 4 << 20
"""bytes"""
MAX_LINES, MAX_ERRORS = 50_000, 100
"""of a batch; further errors are not listed"""


class StoredFile(Struct):
    id: str
    filename: str
    bytes: int
    created_at: int
    """Unix time, as all here"""
    purpose: str = "batch"
    object: str = "file"
    status: str = "processed"


class Batch(Struct):
    """As OpenAI has it."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    object: str = "batch"
    status: str = "validating"
    """then `in_progress`, at its end `completed`, `failed`, `expired` or `cancelled`, and `cancelling` before that"""
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("total", "completed", "failed"), 0)
    )

    @property
    def open(self) -> bool:
        return self.status in ("validating", "in_progress", "cancelling")

    def become(self, status: str) -> None:
        self.status = status
        setattr(self, f"{status}_at", now())

    def result(self, kind: str) -> str:
        """The id of the file of its results of this kind, `output` or `errors`."""
        return f"file-{self.id.removeprefix('batch_')}-{kind}"


class Line(Struct):
    """A request of a batch's input."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class _Done(Struct):
    custom_id: str


R = TypeVar("R", StoredFile, Batch)
_FOLDERS: dict[type[Struct], str] = {StoredFile: "files", Batch: "batches"}


class Store:
    """What belongs to one API key, by its name; empty where there are no keys."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.owner, self._folder = owner, folder / (owner or _NOBODY)
        for name in _FOLDERS.values():
            (self._folder / name).mkdir(parents=True, exist_ok=True)

    def content(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    def cancelling(self, batch: Batch) -> Path:
        """The file that is there where the batch is to be cancelled."""
        return self._folder / "batches" / f"{batch.id}.cancel"

    def get(self, kind: type[R], record_id: str) -> R | None:
        try:
            path = self._folder / _FOLDERS[kind] / f"{record_id}.json"
            record = msgspec.json.decode(path.read_bytes(), type=kind) if _ID.fullmatch(record_id) else None
            if isinstance(record, Batch) and record.open and (path := self.cancelling(record)).exists():
                record.status, record.cancelling_at = "cancelling", int(path.stat().st_mtime)
        except FileNotFoundError:
            return None
        return record

    def all(self, kind: type[R], known: set[str] | None = None) -> list[R]:
        """The newest first, without those whose ids are `known`; an id that is no record's is removed from there."""
        ids = {path.stem for path in (self._folder / _FOLDERS[kind]).glob("*.json")}
        if known is not None:
            known &= ids
            ids -= known
        records = (self.get(kind, each) for each in ids)
        return sorted(filter(None, records), key=lambda each: (each.created_at, each.id), reverse=True)

    def save(self, record: StoredFile | Batch) -> None:
        path = self._folder / _FOLDERS[type(record)] / f"{record.id}.json"
        made = path.with_suffix(".tmp")
        made.write_bytes(msgspec.json.encode(record))
        _sync(made)
        made.replace(path)
        _sync(path.parent)

    def keep(self, file: StoredFile, content: IO[bytes]) -> None:
        """Raises OSError, and keeps nothing then."""
        try:
            with self.content(file.id).open("wb") as kept:
                while part := content.read(1 << 20):
                    kept.write(part)
            _sync(self.content(file.id))
            self.save(file)
        except OSError:
            for path in self._folder.glob(f"files/{file.id}*"):
                path.unlink()
            raise

    def forget(self, batch: Batch) -> None:
        """Delete the record of a batch that is over. Its files stay."""
        self.cancelling(batch).with_suffix(".json").unlink(missing_ok=True)
        self.cancelling(batch).unlink(missing_ok=True)

    def delete(self, file: StoredFile) -> None:
        self.content(f"{file.id}.json").unlink(missing_ok=True)
        self.content(file.id).unlink(missing_ok=True)

    # for the frontend that works

    def check(self, batch: Batch) -> list[dict[str, object]]:
        """Count the requests of its input; return what is wrong with it."""
        errors, ids = list[dict[str, object]](), set[str]()

        def wrong(code: str, message: str, number: int | None = None) -> None:
            errors.append({"code": code, "message": message, "line": number, "param": None})

        with suppress(FileNotFoundError), self.content(batch.input_file_id).open("rb") as file:
            for number, text in enumerate(iter(partial(file.readline, MAX_LINE), b""), 1):
                try:
                    check_parts(text)
                    line = msgspec.json.decode(text, type=Line)
                except (ValueError, RecursionError, BadRequest) as error:
                    wrong("invalid_json_line", str(error), number)
                    continue
                if not line.custom_id or line.custom_id in ids:
                    wrong("duplicate_custom_id", "each line needs a custom_id that no other line has", number)
                if line.url != batch.endpoint:
                    wrong(
                        "mismatched_endpoint", f"url must be the batch's endpoint, {batch.endpoint}", number
                    )
                if line.body.get("stream"):
                    wrong("invalid_request", "an answer in a batch cannot be a stream", number)
                ids.add(line.custom_id)
                if len(errors) >= MAX_ERRORS or len(ids) > MAX_LINES:
                    break
        if not errors and not 0 < len(ids) <= MAX_LINES:
            wrong("invalid_input_file", f"the input file has to be there, with 1 to {MAX_LINES} requests")
        batch.request_counts["total"] = len(ids)
        return errors

    def lines(self, batch: Batch, done: Set[str]) -> Iterator[Line]:
        """The requests of its input, which was checked, without those that are done."""
        with self.content(batch.input_file_id).open("rb") as file:
            for text in file:
                if msgspec.json.decode(text, type=_Done).custom_id not in done:
                    yield msgspec.json.decode(text, type=Line)

    def done(self, batch: Batch, kind: str) -> set[str]:
        """The `custom_id`s in its results of this kind. A line that was cut off is removed."""
        whole, found = 0, set[str]()
        with self.content(batch.result(kind)).open("a+b") as results:
            results.seek(0)
            for text in results:
                if text.endswith(b"\n"):
                    whole += len(text)
                    found.add(msgspec.json.decode(text, type=_Done).custom_id)
            results.truncate(whole)
        return found

    def append(self, batch: Batch, kind: str, results: list[dict[str, object]]) -> None:
        with self.content(batch.result(kind)).open("ab") as file:
            file.write(b"".join(msgspec.json.encode(result) + b"\n" for result in results))

    def finish(self, batch: Batch, kind: str) -> str | None:
        """Make a file of its results of this kind; return the id, None if there are none."""
        file_id = batch.result(kind)
        path = self.content(file_id)
        _sync(path)
        if size := path.stat().st_size:
            self.save(StoredFile(file_id, f"{batch.id}_{kind}.jsonl", size, now(), "batch_output"))
            return file_id
        path.unlink()
        return None


def stores(folder: Path) -> list[Store]:
    return [Store(folder, path.name.removeprefix(_NOBODY)) for path in folder.iterdir() if path.is_dir()]


def lock(file: IO[str]) -> bool:
    """Lock the open file until it is closed, or this process ends; False: another process has it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def now() -> int:
    return int(clock.unix())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
