"""OpenAI's routes `/v1/files` and `/v1/batches`. What one API key made no other key finds."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pdserve.frontend.batches.runner import BatchWork
from pdserve.frontend.batches.store import Record, Store, refused
from pdserve.frontend.edge.body import BodyReader, discard_rest
from pdserve.frontend.edge.response import REFUSALS, HttpError, error_response
from pdserve.frontend.keys.auth import client_of
from pdserve.frontend.plugins import Plugin, PluginContext

MAX_FILE, MAX_BODY = 100 << 20, 1 << 20
"""bytes of an upload, and of what makes a batch"""
MAX_UPLOADED = 16 * MAX_FILE
"""bytes at a time, in the folder for temporary files. A client has no more than are still free"""
WITHIN = 600.0
"""seconds for a body"""

Page = Callable[[Request], Awaitable[Response]]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Metadata = Annotated[dict[_Name, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)]
"""with OpenAI's bounds"""


class _Wanted(msgspec.Struct):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: _Metadata | None = None


class Batches(Plugin):
    """Functions that are not `async` may block: Starlette runs them in threads."""

    def __init__(self, context: PluginContext) -> None:
        self._keys = context.keys
        if context.config.batches is None:
            return
        self._store = store = Store(context.config.batches)
        self._uploads, self._bodies = BodyReader(MAX_UPLOADED), BodyReader()
        self.work = {"batches": BatchWork(context, store).work}
        self.routes = [
            Route("/v1/files", _reading(self._upload), methods=["POST"]),
            Route("/v1/files", lambda asked: _page(asked, store.all("file", self._owner(asked)), 10_000)),
            Route(
                "/v1/files/{id}", lambda asked: _json(store.delete(*self._named(asked))), methods=["DELETE"]
            ),
            Route("/v1/files/{id}", lambda asked: _json(store.get("file", *self._named(asked)))),
            Route("/v1/files/{id}/content", self._content),
            Route("/v1/batches", _reading(self._create), methods=["POST"]),
            Route("/v1/batches", lambda asked: _page(asked, store.all("batch", self._owner(asked)), 20)),
            Route("/v1/batches/{id}", lambda asked: _json(store.get("batch", *self._named(asked)))),
            Route(
                "/v1/batches/{id}/cancel",
                lambda asked: _json(store.cancel(*self._named(asked))),
                methods=["POST"],
            ),
        ]

    def _owner(self, request: Request) -> str:
        """The name of the API key; empty where there are no keys."""
        key = self._keys.find(request.headers)
        return key.name if key else ""

    def _named(self, request: Request) -> tuple[str, str]:
        """Owner and id."""
        return self._owner(request), request.path_params["id"]

    async def _upload(self, request: Request) -> Response:
        length, owner = request.headers.get("content-length", ""), self._owner(request)
        if not length.isdecimal():
            raise HttpError(411, "the request needs a content-length")
        if int(length) > MAX_FILE:
            raise HttpError(413, f"the request body is larger than {MAX_FILE} bytes")
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data":
            raise HttpError(400, "a file is sent as multipart/form-data", "file")
        if options.get(b"charset", b"utf-8").lower() != b"utf-8":  # punycode takes minutes for a megabyte
            raise HttpError(400, "the form must be in UTF-8", "file")
        deadline, client = time.monotonic() + WITHIN, client_of(request, owner)
        try:
            async with self._uploads.parts(request, deadline, client, MAX_FILE) as parts:
                form = await MultiPartParser(request.headers, parts, max_files=1, max_fields=10).parse()
                try:
                    if not isinstance(file := form.get("file"), UploadFile):
                        raise HttpError(400, "`file` must be a file", "file")
                    if form.get("purpose") != "batch":
                        raise HttpError(400, "`purpose` must be batch", "purpose")
                    return _json(
                        await asyncio.to_thread(self._store.keep, owner, file.filename or "", file.file)
                    )
                finally:
                    await form.close()
        except MultiPartException as error:
            raise HttpError(400, error.message, "file") from None
        except OSError as error:  # the folder for temporary files is full, perhaps
            raise refused(error) or error from None

    def _content(self, request: Request) -> Response:
        file = self._store.get("file", *self._named(request))
        parts = (b"".join(text for _, text in part) for part in self._store.lines(file["id"]))
        size = {"content-length": str(file["bytes"])}
        return StreamingResponse(parts, headers=size, media_type="application/jsonl")

    async def _create(self, request: Request) -> Response:
        owner, deadline = self._owner(request), time.monotonic() + WITHIN
        async with self._bodies.read(request, deadline, client_of(request, owner), MAX_BODY) as raw:
            try:
                wanted = msgspec.json.decode(raw, type=_Wanted)
            except (ValueError, RecursionError) as error:
                raise HttpError(400, str(error)) from None
        return _json(await asyncio.to_thread(self._store.create, owner, msgspec.structs.asdict(wanted)))


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


def _page(request: Request, records: list[Record], default: int) -> Response:
    """Part of a list, as `limit`, `after` and `order` say."""
    limit, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not limit.isdecimal() or len(limit) > 9 or not 0 < int(limit) <= 10_000:
        raise HttpError(400, "limit must be a whole number from 1 to 10000", "limit")
    if request.query_params.get("order") == "asc":
        records.reverse()
    if purpose := request.query_params.get("purpose"):
        records = [record for record in records if record.get("purpose", purpose) == purpose]
    ids = [record["id"] for record in records]
    if after is not None and after not in ids:
        raise HttpError(400, "there is none of this id", "after")
    begin = ids.index(after) + 1 if after is not None else 0
    page = records[begin : begin + int(limit)]
    more = begin + len(page) < len(records)
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})
