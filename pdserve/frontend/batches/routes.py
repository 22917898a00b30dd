"""OpenAI's routes `/v1/files` and `/v1/batches`. An API key finds only its own files and batches."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Literal

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pdserve.frontend.batches.runner import BatchRunner
from pdserve.frontend.batches.store import Record, Store, refused
from pdserve.frontend.edge.body import BodyReader, discard_rest
from pdserve.frontend.edge.response import REFUSALS, HttpError, error_response
from pdserve.frontend.keys.auth import client_of
from pdserve.frontend.plugins import Plugin, PluginContext, json_response, query_limit

MAX_FILE, MAX_BODY = 100 << 20, 1 << 20
"""Maximum of bytes in an upload, and in the body that creates a batch."""
MAX_UPLOADING = 16 * MAX_FILE
"""Maximum of bytes of all running uploads together, in the folder for temporary files."""
BODY_SECONDS = 600.0
MAX_LISTED = 10_000

Page = Callable[[Request], Awaitable[Response]]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Metadata = Annotated[dict[_Name, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)]
"""Number of entries and lengths are limited as in OpenAI's API."""


class _NewBatch(msgspec.Struct):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: _Metadata | None = None


class Batches(Plugin):
    """Pages that are not `async` may block: Starlette runs them in threads."""

    def __init__(self, context: PluginContext) -> None:
        self._keys = context.keys
        if context.config.batches is None:
            return
        self._store = store = Store(context.config.batches)
        self._uploads = BodyReader(MAX_UPLOADING)
        self._bodies = BodyReader()
        self.work = {"batches": BatchRunner(context, store).run}
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        self.routes = [
            Route("/v1/files", _reads_body(self._upload), methods=["POST"]),
            Route("/v1/files", self._list("file", MAX_LISTED)),
            Route(file, self._on_record(store.delete), methods=["DELETE"]),
            Route(file, self._on_record(partial(store.get, "file"))),
            Route(f"{file}/content", self._content),
            Route("/v1/batches", _reads_body(self._create), methods=["POST"]),
            Route("/v1/batches", self._list("batch", 20)),
            Route(batch, self._on_record(partial(store.get, "batch"))),
            Route(f"{batch}/cancel", self._on_record(store.cancel), methods=["POST"]),
        ]

    def _owner(self, request: Request) -> str:
        """The name of the API key; empty if no keys are configured."""
        key = self._keys.find(request.headers)
        return key.name if key else ""

    def _list(self, kind: str, default: int) -> Callable[[Request], Response]:
        return lambda request: _page(request, self._store.all(kind, self._owner(request)), default)

    def _on_record(self, act: Callable[[str, str], Record]) -> Callable[[Request], Response]:
        """`act` takes owner and id."""
        return lambda request: json_response(act(self._owner(request), request.path_params["id"]))

    def _content(self, request: Request) -> Response:
        file = self._store.get("file", self._owner(request), request.path_params["id"])
        parts = (b"".join(text for _, text in part) for part in self._store.lines(file["id"]))
        size = {"content-length": str(file["bytes"])}
        return StreamingResponse(parts, headers=size, media_type="application/jsonl")

    async def _upload(self, request: Request) -> Response:
        length, owner = request.headers.get("content-length", ""), self._owner(request)
        if not length.isdecimal():
            raise HttpError(411, "the request needs a content-length")
        if int(length) > MAX_FILE:
            raise HttpError(413, f"the request body is larger than {MAX_FILE} bytes")
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data":
            raise HttpError(400, "a file is sent as multipart/form-data", "file")
        # some encodings are slow: a megabyte of punycode takes minutes
        if options.get(b"charset", b"utf-8").lower() != b"utf-8":
            raise HttpError(400, "the form must be in UTF-8", "file")
        deadline, client = time.monotonic() + BODY_SECONDS, client_of(request, owner)
        try:
            async with self._uploads.parts(request, deadline, client, MAX_FILE) as parts:
                form = await MultiPartParser(request.headers, parts, max_files=1, max_fields=10).parse()
                try:
                    if not isinstance(file := form.get("file"), UploadFile):
                        raise HttpError(400, "`file` must be a file", "file")
                    if form.get("purpose") != "batch":
                        raise HttpError(400, "`purpose` must be batch", "purpose")
                    name = file.filename or ""
                    return json_response(await asyncio.to_thread(self._store.upload, owner, name, file.file))
                finally:
                    await form.close()
        except MultiPartException as error:
            raise HttpError(400, error.message, "file") from None
        except OSError as error:  # the folder for temporary files may be full
            raise refused(error) or error from None

    async def _create(self, request: Request) -> Response:
        owner, deadline = self._owner(request), time.monotonic() + BODY_SECONDS
        async with self._bodies.read(request, deadline, client_of(request, owner), MAX_BODY) as raw:
            try:
                wanted = msgspec.json.decode(raw, type=_NewBatch)
            except (ValueError, RecursionError) as error:
                raise HttpError(400, str(error)) from None
        batch = await asyncio.to_thread(self._store.create, owner, msgspec.structs.asdict(wanted))
        return json_response(batch)


def _reads_body(page: Page) -> Page:
    """Make a page that reads the rest of a body before it responds with an error."""

    async def answer(request: Request) -> Response:
        try:
            return await page(request)
        except REFUSALS as error:
            await discard_rest(request)
            return error_response(request.url.path, error)

    return answer


def _page(request: Request, records: list[Record], default: int) -> Response:
    """One page of a list, by the query parameters `limit`, `after`, `order` and `purpose`."""
    limit, after = query_limit(request, default, MAX_LISTED), request.query_params.get("after")
    if request.query_params.get("order") == "asc":
        records.reverse()
    if purpose := request.query_params.get("purpose"):
        records = [record for record in records if record.get("purpose", purpose) == purpose]
    ids = [record["id"] for record in records]
    if after is not None and after not in ids:
        raise HttpError(400, "no object has this id", "after")
    begin = ids.index(after) + 1 if after is not None else 0
    page = records[begin : begin + limit]
    more = begin + len(page) < len(records)
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(
        {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
    )
