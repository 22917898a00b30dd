"""The HTTP edge: one request from its arrival to the end of its answer.

`FrontendApp` is called once for each request. It checks the deadline, the API key and the size of the body, finds the
model that the body names, waits until that model's admission control lets the request in, and hands it to the model's
own app, which is vLLM's (`frontend/model`). That one reads the body again and writes the answer, chunk by chunk, into a
`ResponseWriter`. Pages that need no model are in `watching/pages.py`.
"""

import asyncio
import logging
import re
import time
import uuid
from contextlib import nullcontext, suppress
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from pdserve.config.schema import FrontendConfig
from pdserve.errors import BadRequest, Overloaded
from pdserve.frontend.admission.control import Admission, ModelReplaced
from pdserve.frontend.admission.estimate import RequestSize
from pdserve.frontend.edge.answer import HttpError, ResponseWriter, error_response, log_request
from pdserve.frontend.edge.body import (
    SANE_ID,
    BodyReader,
    ParsedBody,
    app_scope,
    discard_rest,
    max_body,
    parse_body,
    replay,
)
from pdserve.frontend.edge.connections import CHUNKS, UNREAD
from pdserve.frontend.edge.deltas import DeltaStream
from pdserve.frontend.edge.trace import (
    NO_WORKER,
    RequestFailure,
    RequestTrace,
    current_trace,
    seconds_allowed,
)
from pdserve.frontend.keys.auth import ApiKeys, client_of, is_open_here
from pdserve.frontend.keys.usage import KeyUse
from pdserve.frontend.model.served import ServedModel, ServedModels
from pdserve.frontend.watching.dashboard.page import Dashboard
from pdserve.frontend.watching.pages import FrontendPages, MetricsPage
from pdserve.frontend.watching.receipts import Receipts
from pdserve.observe.tracing import Tracer

logger = logging.getLogger(__name__)

GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generative_scoring",
    }
)
"""POST, with a JSON body that may name its model; a decode worker has to work for them"""
TOKENIZING = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""likewise, but no decode worker works for them"""
BY_QUERY = re.compile(r"/v1/responses/[^/]+(/cancel)?|/docs|/docs/oauth2-redirect|/redoc|/openapi\.json")
"""without a body: answered by the model of the query parameter `model`, or by the only one"""

LONG_TEXT = 64 << 10
"""bytes of a body to be tokenized; longer ones take turns"""
GRACE = 0.3
"""seconds after the deadline within which the model's own, more exact answer may still come"""
_END_WITHIN = 5.0
"""seconds for a model's app to end after it was told of a disconnect"""
_ERRORS = (HttpError, BadRequest, Overloaded)


class FrontendApp:
    """One ASGI app for all models; it answers from the first moment, when there are none yet."""

    def __init__(
        self,
        models: ServedModels,
        metrics: MetricsPage,
        keys: ApiKeys,
        request_timeout: float,
        max_request_timeout: float = FrontendConfig.max_request_timeout,
        dashboard: Dashboard | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._models = models
        self.receipts = Receipts(metrics.own, tracer or Tracer())
        self._pages = FrontendPages(models, metrics, keys, self.receipts, dashboard)
        self._keys = keys
        self._request_timeout = request_timeout
        self._max_request_timeout = max_request_timeout
        self._bodies = BodyReader()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        request_id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        trace = RequestTrace(request_id, scope["path"], time.monotonic() + self._request_timeout)
        response = ResponseWriter(send, trace)
        try:
            await self._respond(request, response)
        finally:
            self.receipts.end(response)

    async def _respond(self, request: Request, response: ResponseWriter) -> None:
        trace = response.trace
        try:
            await self._answer(request, response)
        except ClientDisconnect:  # before the body was complete
            return
        except _ERRORS as error:
            if response.status:  # the answer has begun, or was given at the deadline
                await response.fail(RequestFailure(error.status, str(error)))
            else:
                response.refusal = RequestFailure(error.status, str(error))
                answer = error_response(trace.path, error)
                if "expect" in request.headers:  # its body may come or not: what follows could be either
                    answer.headers["connection"] = "close"
                await response.reply(answer, before_end=partial(discard_rest, request))
        except Exception:
            logger.exception("%s: the request failed in the frontend", trace.request_id)
            await response.fail(RequestFailure(500, "internal error"))
        if trace.path in GENERATING | TOKENIZING:
            log_request(response)

    async def _answer(self, request: Request, response: ResponseWriter) -> None:
        trace, path = response.trace, response.trace.path
        asked = request.headers.get("x-request-timeout")
        trace.deadline = trace.started + seconds_allowed(
            asked, self._request_timeout, self._max_request_timeout
        )
        if not is_open_here(request.scope) and (key := self._keys.find(path, request.headers)):
            trace.key = key.name
        bare, by_query = path.rstrip("/"), BY_QUERY.fullmatch(path) is not None
        if bare != path and bare in GENERATING | TOKENIZING | self._pages.paths:
            there = RedirectResponse(request.url.replace(path=bare))
            await response.reply(there, before_end=partial(discard_rest, request))
            return
        if path not in GENERATING | TOKENIZING and not by_query:
            await self._pages(request.scope, request.receive, response)
            return
        if request.method != "POST" and not by_query:
            trace.headers["allow"] = "POST"
            raise HttpError(405, f"{path} takes POST")
        if path in GENERATING:
            self.receipts.begin(request, response)
        # the model is known only when the body has been read: the bound is that of the longest context
        longest = max((card.max_model_len for card in self._models.known()), default=0)
        most = max_body(longest, tokenizing=path in TOKENIZING)
        with nullcontext() if by_query else KeyUse(self._keys.ledger, response) as use:
            async with self._bodies.read(request, trace.deadline, client_of(request, trace), most) as raw:
                named = request.query_params.get("model") or None
                body = ParsedBody(raw, named, RequestSize(0, None)) if by_query else parse_body(path, raw)
                if path in GENERATING and use is not None:
                    use.reserve(body.size, longest)
                await self._forward(body, request, response)

    # to a model

    async def _forward(self, body: ParsedBody, request: Request, response: ResponseWriter) -> None:
        """Let the model answer; again where another model replaces it before the request has begun."""
        name = body.model
        while True:
            model = self._models.find(name)
            name = response.trace.model = model.card.name
            try:
                await self._admit(model, body, request, response)
                if not response.redirected:
                    return
            except ModelReplaced:
                if response.ended:
                    return
            request_id = response.trace.request_id
            logger.info("%s: %s was replaced: the request goes to its successor", request_id, name)
            response.restart()

    async def _admit(
        self, model: ServedModel, body: ParsedBody, request: Request, response: ResponseWriter
    ) -> None:
        """Wait for the model's admission, and run the request. Raises ModelReplaced."""
        trace = response.trace
        most = max_body(model.card.max_model_len, tokenizing=trace.path in TOKENIZING)
        if len(body.raw) > most:
            raise HttpError(413, f"the request body is larger than {most} bytes")
        client = client_of(request, trace)
        if trace.path in GENERATING:
            trace.hops.held("" if model.live else NO_WORKER)
            trace.admission = admission = model.admission.enter(client, body.size, trace.deadline)
        else:
            admission = model.admission.bypass(client)
        try:
            await _run(model, admission, body, request, response)
        finally:
            model.admission.leave(admission)


async def _run(
    model: ServedModel,
    admission: Admission,
    body: ParsedBody,
    request: Request,
    response: ResponseWriter,
) -> None:
    """Let the model's app answer, unless the client leaves or the deadline passes before. Raises ModelReplaced."""
    trace, gone = response.trace, asyncio.Event()
    current_trace.set(trace)
    extensions = request.scope.setdefault("extensions", {})
    extensions[UNREAD] = admission.set_unread
    if body.plain and CHUNKS in extensions:
        trace.deltas = DeltaStream(extensions[CHUNKS])

    async def answer() -> None:
        await admission.wait()
        trace.hops.released()
        is_long = trace.path in TOKENIZING and len(body.raw) > LONG_TEXT
        async with model.admission.long_text(admission.client) if is_long else nullcontext():
            processor = await model.ready()
            app = processor.aside if body.large else processor.app
            await app(app_scope(request, trace.request_id, body), replay(body.raw, gone), response)

    app = asyncio.create_task(answer())
    watch = asyncio.create_task(_disconnected(request))
    left = trace.deadline + GRACE - time.monotonic()
    try:
        done, _ = await asyncio.wait({app, watch}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done and admission.waiting and not model.live:
            await response.fail(RequestFailure.no_worker(trace.model))
        elif not done:
            await response.fail(RequestFailure(504, "the request's deadline passed"))
        elif app not in done:
            response.disconnect()
    finally:
        watch.cancel()
        gone.set()  # not cancel: vLLM's handlers would leave their inner tasks behind
        if admission.waiting:
            app.cancel()
        await _finish(app, response)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _finish(app: "asyncio.Task[None]", response: ResponseWriter) -> None:
    """Wait until the model's app, which was told of the disconnect, has ended by itself, or end it."""
    await asyncio.wait({app}, timeout=_END_WITHIN)
    app.cancel()
    trace = response.trace
    try:
        with suppress(asyncio.CancelledError):
            await app
    except (*_ERRORS, ModelReplaced):
        raise
    except Exception:
        if trace.failure is None:
            logger.exception("the model's app failed")
            trace.failure = RequestFailure(500, "internal error")
        if not response.redirected:
            await response.fail(trace.failure)
