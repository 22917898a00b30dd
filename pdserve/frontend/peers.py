"""Requests about a response that another frontend is working on: passed on to it, and its answer to the client.

All frontends of a machine share a port, so such a request comes to any of them. What is over lies in the store; what is
not is in one frontend only.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Scope

from pdserve.errors import PeerGone, QueueUnavailable
from pdserve.frontend.edge.answer import HttpError, ResponseWriter
from pdserve.frontend.edge.trace import RETRY_AFTER
from pdserve.frontend.model.stored import UNFINISHED, RunningResponse, StoredResponses
from pdserve.records import AnswerHead, Instance, ResponseQuery, Role, StoredResponse

logger = logging.getLogger(__name__)

RESPONSE = re.compile(r"/v1/responses/([^/]+)(/cancel)?")
"""path of a stored response"""
_EVENT = re.compile(r"[0-9]{1,9}")
"""`sequence_number` of an event of a stored stream"""
OWNER = "pdserve.owner"
"""extension of the scope of a request that came through another frontend: the name of its API key, which was checked
there"""


class PeerFrontends:
    def __init__(self, stored: StoredResponses, registered: Callable[[Role], Iterable[Instance]]) -> None:
        self.stored = stored
        self._registered = registered

    async def load(self, response_id: str) -> None:
        """Load the response that a request continues. Raises HttpError."""
        try:
            response_id.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON may spell
            raise HttpError(
                400, f"previous_response_id is no text: {error.reason}", "previous_response_id"
            ) from error
        with _readable():
            await self.stored.name(response_id)

    async def find(self, response_id: str, request: Request, response: ResponseWriter) -> str:
        """Return the model whose app has to answer a request about this response, unless another frontend has answered
        it. Raises HttpError."""
        with _readable():
            found = await self.stored.name(response_id)
            if found is None:
                raise HttpError(404, f"Response with id '{response_id}' not found.", "response_id")
            if not _EVENT.fullmatch(request.query_params.get("starting_after", "0")):  # vLLM answers 500
                raise HttpError(
                    400, "starting_after must be the number of an event, from 0", "starting_after"
                )
            if isinstance(found, RunningResponse) or not found.frontend:
                return found.model
            if not await self._is_there(found.frontend, request, response):
                await self.stored.replace(_failed(found))
            return found.model

    async def _is_there(self, frontend: str, request: Request, response: ResponseWriter) -> bool:
        """Pass the request on to the frontend that works on the response. Return whether that one lives: then it has
        answered, or nothing newer than the stored state is known."""
        if frontend == self.stored.frontend:
            return False  # it was lost here, in an outage of the store
        try:
            await self._pass_on(frontend, request, response)
        except PeerGone:
            if response.status:
                raise HttpError(503, f"{frontend}, which makes the response, is gone") from None
            if all(frontend != other.id for other in self._registered(Role.FRONTEND)):
                return False
            if request.method != "GET" or request.query_params.get("stream"):
                message = "the frontend that makes the response cannot be reached"
                raise HttpError(503, message, None, RETRY_AFTER) from None
        return True

    async def _pass_on(self, frontend: str, request: Request, response: ResponseWriter) -> None:
        """Pass the request on, until its deadline. Raises PeerGone, QueueUnavailable, HttpError and, where the client
        leaves, ClientDisconnect."""
        passing = asyncio.create_task(self._pass_answer(frontend, request, response))
        watch = asyncio.create_task(disconnected(request))
        left = response.trace.deadline - time.monotonic()
        try:
            done, _ = await asyncio.wait({passing, watch}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise HttpError(504, "the request's deadline passed")
            if passing not in done:
                raise ClientDisconnect
            passing.result()
        finally:
            passing.cancel()
            watch.cancel()
            await asyncio.wait({passing, watch})

    async def _pass_answer(self, frontend: str, request: Request, response: ResponseWriter) -> None:
        query = ResponseQuery(
            response.trace.key,
            request.method,
            request.scope["path"],
            request.scope["query_string"].decode("latin-1"),
        )
        parts = self.stored.store.ask(frontend, msgspec.msgpack.encode(query))
        async with aclosing(cast(AsyncGenerator[bytes], parts)):
            first = await anext(aiter(parts), None)
            if first is None:
                raise PeerGone(frontend)
            head = msgspec.msgpack.decode(first, type=AnswerHead)
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
            await response({"type": "http.response.start", "status": head.status, "headers": headers})
            async for part in parts:
                await response({"type": "http.response.body", "body": part, "more_body": True})
            await response({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_peer(app: ASGIApp, question: bytes) -> AsyncIterator[bytes]:
    """Yield what `app` answers to another frontend: a head, and the parts of the body."""
    query = msgspec.msgpack.decode(question, type=ResponseQuery)
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": query.method,
        "path": query.path,
        "raw_path": query.path.encode(),
        "query_string": query.query.encode("latin-1"),
        "headers": [],
        "client": None,
        "extensions": {OWNER: query.owner},
    }
    received = False

    async def receive() -> Message:
        nonlocal received
        if received:
            await asyncio.get_running_loop().create_future()
        received = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def answer() -> None:
        await app(scope, receive, messages.put)

    answering = asyncio.create_task(answer())
    answering.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while message := await messages.get():
            if message["type"] == "http.response.start":
                headers = [
                    (name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]
                ]
                yield msgspec.msgpack.encode(AnswerHead(message["status"], headers))
            elif body := message.get("body", b""):
                yield body
    finally:
        answering.cancel()
        await asyncio.wait({answering})


def _failed(record: StoredResponse) -> StoredResponse:
    """Return the response as failed: its frontend is gone."""
    fields = msgspec.json.decode(record.response)
    if fields["status"] in UNFINISHED:
        error = {"code": "server_error", "message": "the frontend that made it is gone"}
        fields |= {"status": "failed", "error": error}
    return msgspec.structs.replace(record, response=msgspec.json.encode(fields), frontend="")


def owner_at_peer(request: Request) -> str | None:
    """Return the name of the API key of a request that came through another frontend; None of any other."""
    owner: str | None = request.scope.get("extensions", {}).get(OWNER)
    return owner


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except QueueUnavailable as error:
        raise HttpError(503, f"stored responses cannot be read now: {error}", None, RETRY_AFTER) from error


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
