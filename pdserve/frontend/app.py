"""The HTTP edge: who may, which model, how much and how long. What is generated is the processors'
business."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from urllib.parse import parse_qs
from weakref import WeakValueDictionary

from pdserve.config.schema import FrontendConfig
from pdserve.errors import BadRequest, Overloaded
from pdserve.frontend import routes
from pdserve.frontend.admission.control import Admission, ModelReplaced
from pdserve.frontend.admission.limits import deadline, max_body
from pdserve.frontend.answer import Answer
from pdserve.frontend.asgi import Receive, Scope, Send, header, respond, respond_error, respond_json
from pdserve.frontend.auth import OPEN_PATHS, ApiKeys
from pdserve.frontend.body import Body, ClientGone, Incoming, Intake, Refusal, Replay, look_into
from pdserve.frontend.connections import UNREAD
from pdserve.frontend.models import ServedModel, ServedModels
from pdserve.frontend.trace import RETRY_AFTER, RequestFailure, RequestTrace, current_trace
from pdserve.frontend.versions import versions
from pdserve.messages import ModelCard
from pdserve.observe.metrics import E2E, REQUESTS

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MODELS = "/v1/models"
LONG = 64 << 10
"""bytes of a text to be tokenized"""
GRACE = 0.3
"""seconds after the deadline within which the processor's own, more exact answer may still come"""


class FrontendApp:
    """One ASGI app for all models; it answers from the first moment, when there are none yet."""

    def __init__(
        self,
        models: ServedModels,
        metrics_page: Callable[[], Awaitable[bytes]],
        keys: ApiKeys,
        request_timeout: float,
        max_request_timeout: float = FrontendConfig.max_request_timeout,
    ) -> None:
        self._roster = models
        self._metrics_page = metrics_page
        self._keys = keys
        self._request_timeout = request_timeout
        self._max_request_timeout = max_request_timeout
        self._intake = Intake()
        self._long: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """by client"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": "no WebSocket routes"})
            case _:
                raise NotImplementedError(f"ASGI scope {scope['type']}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        trace = RequestTrace(
            _request_id(header(scope, "x-request-id")), time.monotonic() + self._request_timeout
        )
        answer = Answer(send, trace, path)
        incoming = Incoming(receive)
        try:
            trace.deadline = deadline(
                header(scope, "x-request-timeout"), self._request_timeout, self._max_request_timeout
            )
            if not self._keys.allow(path, header(scope, "authorization"), header(scope, "x-api-key")):
                raise Refusal(401, "a valid API key is needed: Authorization: Bearer KEY")
            await self._answer(scope, incoming, answer, trace)
        except Refusal as no:
            await respond_error(
                answer.own,
                path,
                no.status,
                no.message,
                param=no.param,
                retry_after=no.retry_after,
                before_end=incoming.discard,
            )
        except (BadRequest, Overloaded) as error:
            await respond_error(
                answer.own,
                path,
                error.status,
                str(error),
                param=error.param,
                retry_after=error.retry_after,
                before_end=incoming.discard,
            )
        except ClientGone:
            return
        self._account(path, answer, answer.trace)

    # routes

    async def _answer(self, scope: Scope, incoming: Incoming, answer: Answer, trace: RequestTrace) -> None:
        path, method = scope["path"], scope["method"]
        if routes.is_generate(path):
            if method != "POST":
                raise Refusal(405, f"{path} takes POST")
            async with self._body(scope, incoming, trace) as raw:
                await self._dispatch(look_into(raw), scope, incoming, answer)
        elif (method in ("GET", "HEAD") and path in OPEN_PATHS) or (method, path) == ("POST", "/ping"):
            await self._own_page(path, answer)
        elif method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")):
            await self._models(path.removeprefix(_MODELS).removeprefix("/"), answer)
        elif routes.is_by_model(path):
            query = parse_qs(scope["query_string"].decode("latin-1"), errors="replace")
            name = query.get("model", [None])[0]
            async with self._body(scope, incoming, trace) as raw:
                await self._dispatch(Body(raw, name), scope, incoming, answer)
        elif routes.is_left_out(path):
            raise Refusal(404, f"{path} is not available on a separated graph")
        else:
            raise Refusal(404, f"there is no {path}")

    async def _own_page(self, path: str, answer: Answer) -> None:
        if path == "/load":
            await respond_json(answer.own, 200, {"server_load": self._roster.load()})
        elif path == "/version":
            await respond_json(answer.own, 200, versions())
        elif path == "/metrics":
            page = await self._metrics_page()
            await respond(answer.own, 200, page, "text/plain; version=0.0.4; charset=utf-8")
        else:
            missing, degraded = self._roster.missing(), self._roster.degraded()
            health: dict[str, object] = {
                "status": "unavailable" if missing else "degraded" if degraded else "ok",
                "workers": self._roster.live(),
            }
            if missing:
                health["missing"] = missing
            if degraded:
                health["degraded"] = degraded
            await respond_json(answer.own, 503 if missing else 200, health)

    async def _models(self, name: str, answer: Answer) -> None:
        cards = self._roster.listed()
        if not name:
            await respond_json(
                answer.own, 200, {"object": "list", "data": [_listing(card) for card in cards]}
            )
            return
        for card in cards:
            if card.name == name:
                await respond_json(answer.own, 200, _listing(card))
                return
        raise Refusal(404, f"the model {name!r} does not exist", "model")

    # to a model

    async def _dispatch(self, body: Body, scope: Scope, incoming: Incoming, answer: Answer) -> None:
        """Again where the model is replaced before the request is begun."""
        model = body.model
        while True:
            served = self._roster.find(model)
            model = answer.trace.model = served.card.name
            try:
                await self._try(served, body, scope, incoming, answer)
                if not answer.given_back:
                    return
            except ModelReplaced:
                if answer.ended:
                    return
            logger.info(
                "%s: %s was replaced: the request goes to its successor", answer.trace.request_id, model
            )
            answer.anew()

    async def _try(
        self, served: ServedModel, body: Body, scope: Scope, incoming: Incoming, answer: Answer
    ) -> None:
        """Raises ModelReplaced."""
        trace = answer.trace
        most = max_body(served.card.max_model_len, passing=routes.is_passing(scope["path"]))
        if len(body.raw) > most:
            raise Refusal(413, f"the request body is larger than {most} bytes")
        if routes.needs_turn(scope["path"]):
            ticket = served.admission.enter(self._client(scope), body.size, trace.deadline)
            trace.admission = ticket
        else:
            ticket = served.admission.bypass()
        try:
            await self._run(served, ticket, body.raw, scope, incoming, answer, trace)
        finally:
            served.admission.leave(ticket)

    @asynccontextmanager
    async def _turn(
        self, served: ServedModel, ticket: Admission, scope: Scope, raw: bytes
    ) -> AsyncIterator[None]:
        """Long texts that are only tokenized come one after another, in turn round the clients: each takes seconds,
        and prompts that are to be generated from are tokenized by the same threads."""
        await ticket.wait()
        if len(raw) <= LONG or not routes.is_passing(scope["path"]):
            yield
            return
        async with self._long.setdefault(self._client(scope), asyncio.Lock()), served.long:
            yield

    def _body(
        self, scope: Scope, incoming: Incoming, trace: RequestTrace
    ) -> AbstractAsyncContextManager[bytes]:
        """Which model it is for is known when it has been read: the bound is that of the longest context."""
        longest = max((card.max_model_len for card in self._roster.known()), default=0)
        most = max_body(longest, passing=routes.is_passing(scope["path"]))
        return self._intake.read(incoming, trace.deadline, self._client(scope), most)

    def _client(self, scope: Scope) -> str:
        address = scope["client"][0] if scope.get("client") else ""
        return self._keys.who(header(scope, "authorization"), header(scope, "x-api-key"), address)

    async def _run(
        self,
        served: ServedModel,
        ticket: Admission,
        raw: bytes,
        scope: Scope,
        incoming: Incoming,
        answer: Answer,
        trace: RequestTrace,
    ) -> None:
        """Until the app has answered, the client is gone or the deadline has passed."""
        gone = asyncio.Event()
        current_trace.set(trace)
        scope.setdefault("extensions", {})[UNREAD] = Unread(served, ticket, trace)
        turn = self._turn(served, ticket, scope, raw)
        app = asyncio.create_task(_call(served, turn, _inside(scope, trace), Replay(raw, gone), answer))
        watch = asyncio.create_task(_disconnected(incoming))
        left = trace.deadline + GRACE - time.monotonic()
        try:
            done, _ = await asyncio.wait({app, watch}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done and ticket.waiting and not served.live:
                failure = RequestFailure.no_worker(trace.model)
                await answer.end_with(failure.status, failure.message, failure.retry_after)
            elif not done:
                await answer.end_with(504, "the request's deadline passed")
            elif app not in done:
                answer.mute()
        finally:
            watch.cancel()
            gone.set()  # not cancel: vLLM's handlers would leave their inner tasks behind
            if ticket.waiting:
                app.cancel()
            await _finished(app, answer, trace)

    def _account(self, path: str, answer: Answer, trace: RequestTrace) -> None:
        if not routes.is_generate(path):
            return
        total = time.monotonic() - trace.started
        code = answer.status or 499  # the client left before an answer
        REQUESTS.labels(trace.model, str(code)).inc()
        if trace.first_token is not None:
            E2E.labels(trace.model).observe(total)
        logger.info(
            "%s %s model=%s code=%d tokens=%d+%d ttft=%s total=%.3f prefill=%s instance=%s",
            trace.request_id,
            path,
            trace.model or "-",
            code,
            trace.prompt_tokens,
            trace.output_tokens,
            "-" if trace.ttft is None else f"{trace.ttft:.3f}",
            total,
            trace.prefill or "-",
            trace.instances or "-",
        )


class Unread:
    """Told again and again whether the client reads: while it does not, and others wait, its places are theirs."""

    def __init__(self, served: ServedModel, ticket: Admission, trace: RequestTrace) -> None:
        self._serving = served
        self._ticket = ticket
        self._trace = trace
        self._paused = False

    def __call__(self, unread: bool) -> None:
        processor = self._serving.processor
        if processor is None or unread == self._paused:
            return
        if unread and self._serving.admission.others_wait(self._ticket):
            logger.info("%s: nobody reads it and others wait: paused", self._trace.request_id)
            processor.core.pause(self._trace)
            self._paused = True
        elif self._paused and not unread:
            processor.core.resume(self._trace)
            self._paused = False


async def _call(
    served: ServedModel,
    turn: AbstractAsyncContextManager[None],
    scope: Scope,
    receive: Replay,
    answer: Answer,
) -> None:
    async with turn:
        await served.settled.wait()
        if served.retired.is_set() and served.processor is None:
            raise ModelReplaced
        if served.processor is None:
            why = served.problem
            raise Refusal(503, f"{served.card.name} is not being served: {why}", retry_after=RETRY_AFTER)
        await served.processor.app(scope, receive, answer)


async def _finished(app: "asyncio.Task[None]", answer: Answer, trace: RequestTrace) -> None:
    """A disconnect was told to the app: it ends by itself, or is ended."""
    await asyncio.wait({app}, timeout=5.0)
    app.cancel()
    try:
        with suppress(asyncio.CancelledError):
            await app
    except (Refusal, BadRequest, Overloaded, ModelReplaced):
        raise
    except Exception:
        if trace.failure is None:
            logger.exception("the model's app failed")
            trace.failure = RequestFailure(500, "internal error")
        await answer.fail()


async def _disconnected(incoming: Incoming) -> None:
    with suppress(ClientGone):
        while True:
            await incoming.part()


def _inside(scope: Scope, trace: RequestTrace) -> Scope:
    """As vLLM's app sees the request: always with a request id, from which it makes the response's id."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    return {**scope, "headers": [*headers, (b"x-request-id", trace.request_id.encode())]}


def _request_id(given: str | None) -> str:
    return given if given and _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _listing(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "root": card.model,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
