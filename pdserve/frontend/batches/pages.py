"""OpenAI's routes `/v1/files` and `/v1/batches`. What one API key made no other key finds."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Literal, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from pdserve.frontend.batches.store import Batch, Store, StoredFile, now
from pdserve.frontend.batches.work import BatchWork
from pdserve.frontend.edge.answer import REFUSALS, HttpError, error_response
from pdserve.frontend.edge.body import BodyReader, discard_rest
from pdserve.frontend.keys.auth import client_of
from pdserve.frontend.ribs import Rib, RibContext

MAX_FILE, MAX_BODY = 100 << 20, 1 << 20
"""bytes of an upload, and of what makes a batch"""
MAX_FILES, MAX_STORED, MAX_OPEN, MAX_OVER = 1000, 10 << 30, 100, 1000
"""of a key: files, their bytes, batches that are not over, and those that are: older ones are forgotten"""
UPLOADS = 16
"""at a time: they lie in the folder for temporary files. A client has no more than are still free"""
WITHIN = 600.0
"""seconds for a body"""
WINDOW = 24 * 3600
"""seconds for a batch"""

R = TypeVar("R", StoredFile, Batch)
Page = Callable[[Request], Awaitable[Response]]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Metadata = Annotated[dict[_Name, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)]
"""with OpenAI's bounds"""


class _Wanted(msgspec.Struct):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: _Metadata | None = None


class Batches(Rib):
    """Functions that are not `async` may block: Starlette runs them in threads."""

    def __init__(self, context: RibContext) -> None:
        self._keys = context.keys
        if context.config.batches is None:
            return
        self._folder = context.config.batches
        self._folder.mkdir(parents=True, exist_ok=True)
        self._uploads, self._bodies = list[str](), BodyReader()
        self.work = {"batches": BatchWork(context).work}
        self.routes = [
            Route("/v1/files", _reading(self._upload), methods=["POST"]),
            Route("/v1/files", self._files),
            Route("/v1/files/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/files/{id}", lambda request: _json(self._find(StoredFile, request))),
            Route("/v1/files/{id}/content", self._content),
            Route("/v1/batches", _reading(self._create), methods=["POST"]),
            Route("/v1/batches", self._batches),
            Route("/v1/batches/{id}", lambda request: _json(self._find(Batch, request))),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    def _key(self, request: Request) -> str:
        key = self._keys.find(request.headers)
        return key.name if key else ""

    def _store(self, request: Request) -> Store:
        return Store(self._folder, self._key(request))

    def _find(self, kind: type[R], request: Request) -> R:
        if (found := self._store(request).get(kind, request.path_params["id"])) is None:
            raise HttpError(404, f"there is no {kind.__name__} of this id", "id")
        return found

    @asynccontextmanager
    async def _place(self, client: str) -> AsyncIterator[None]:
        """A place for an upload."""
        if self._uploads.count(client) >= UPLOADS - len(self._uploads):
            raise HttpError(429, f"{len(self._uploads)} files are being uploaded", retry_after=5.0)
        self._uploads.append(client)
        try:
            yield
        finally:
            self._uploads.remove(client)

    async def _upload(self, request: Request) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            raise HttpError(411, "the request needs a content-length")
        if int(length) > MAX_FILE:
            raise HttpError(413, f"the request body is larger than {MAX_FILE} bytes")
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HttpError(400, "a file is sent as multipart/form-data", "file")
        try:
            async with (
                self._place(client_of(request, self._key(request))),
                asyncio.timeout(WITHIN),
                request.form(max_files=1, max_fields=10) as form,
            ):
                file = form.get("file")
                if not isinstance(file, UploadFile):
                    raise HttpError(400, "`file` must be a file", "file")
                if form.get("purpose") != "batch":
                    raise HttpError(400, "`purpose` must be batch", "purpose")
                store = await asyncio.to_thread(self._store, request)
                files = await asyncio.to_thread(store.all, StoredFile)
                if len(files) >= MAX_FILES or sum(each.bytes for each in files) > MAX_STORED:
                    raise HttpError(400, f"there are {len(files)} files: delete some")
                name = f"file-{uuid.uuid4().hex}"
                made = StoredFile(name, file.filename or "", file.size or 0, now())
                await asyncio.to_thread(store.keep, made, file.file)
        except HTTPException as error:
            raise HttpError(400, error.detail, "file") from None
        except TimeoutError:
            raise HttpError(408, f"the file did not come within {WITHIN:g} seconds") from None
        return _json(made)

    def _files(self, request: Request) -> Response:
        files = self._store(request).all(StoredFile)
        purpose = request.query_params.get("purpose")
        return _page(request, [file for file in files if purpose in (None, file.purpose)], 10_000)

    def _delete(self, request: Request) -> Response:
        file, store = self._find(StoredFile, request), self._store(request)
        for batch in store.all(Batch):
            if batch.open and batch.input_file_id == file.id:
                raise HttpError(400, f"{batch.id}, which is {batch.status}, reads the file: cancel it before")
        store.delete(file)
        return _json({"id": file.id, "object": "file", "deleted": True})

    def _content(self, request: Request) -> Response:
        file = self._find(StoredFile, request)
        path = self._store(request).content(file.id)
        return FileResponse(path, media_type="application/jsonl")

    async def _create(self, request: Request) -> Response:
        client, deadline = client_of(request, self._key(request)), time.monotonic() + WITHIN
        async with self._bodies.read(request, deadline, client, MAX_BODY) as raw:
            try:
                wanted = msgspec.json.decode(raw, type=_Wanted)
            except (ValueError, RecursionError) as error:
                raise HttpError(400, str(error)) from None
            return await asyncio.to_thread(self._made, request, wanted)

    def _made(self, request: Request, wanted: _Wanted) -> Response:
        store = self._store(request)
        if store.get(StoredFile, wanted.input_file_id) is None:
            raise HttpError(400, "there is no file of this id", "input_file_id")
        batches = store.all(Batch)
        over = [batch for batch in batches if not batch.open]
        if len(batches) - len(over) >= MAX_OPEN:
            raise HttpError(429, f"{MAX_OPEN} batches of this key are not over", retry_after=60.0)
        for old in over[MAX_OVER:]:
            store.forget(old)
        name = f"batch_{uuid.uuid4().hex}"
        batch = Batch(name, wanted.endpoint, wanted.input_file_id, now(), now() + WINDOW, wanted.metadata)
        store.save(batch)
        return _json(batch)

    def _batches(self, request: Request) -> Response:
        return _page(request, self._store(request).all(Batch), 20)

    def _cancel(self, request: Request) -> Response:
        batch = self._find(Batch, request)
        if not batch.open:
            raise HttpError(400, f"the batch is {batch.status}")
        self._store(request).cancelling(batch).touch()
        return _json(self._find(Batch, request))


def _reading(page: Page) -> Page:
    """A page that reads a body: its errors are answered when the rest of that has been read, too."""

    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except REFUSALS as error:
            await discard_rest(request)
            return error_response(request.url.path, error)

    return answer


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _page(request: Request, records: list[R], default: int) -> Response:
    """Part of a list, as `limit`, `after` and `order` say."""
    limit, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not limit.isdecimal() or len(limit) > 9 or not 0 < int(limit) <= 10_000:
        raise HttpError(400, "limit must be a whole number from 1 to 10000", "limit")
    if request.query_params.get("order") == "asc":
        records.reverse()
    ids = [record.id for record in records]
    if after is not None and after not in ids:
        raise HttpError(400, "there is none of this id", "after")
    begin = ids.index(after) + 1 if after is not None else 0
    page = records[begin : begin + int(limit)]
    more = begin + len(page) < len(records)
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})
