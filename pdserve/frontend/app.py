"""The frontend's ASGI app: what happens to an HTTP request, layer by layer. It gets a deadline, its API key is checked,
the key's limits apply, the body is read, the body names the model, the model's admission control queues the request,
and the model's app answers it.

The model's app is vLLM's (`frontend/model`). It parses the body again, and writes the response chunk by chunk into a
`ResponseWriter`. Plugins (`plugins.py`) observe requests and add pages.
"""

import logging
import time
import uuid
from contextlib import nullcontext
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from pdserve.config.schema import FrontendConfig
from pdserve.frontend.admission.granted import ModelReplaced
from pdserve.frontend.admission.wait_estimate import RequestSize
from pdserve.frontend.edge.body import (
    REQUEST_ID,
    BodyReader,
    ParsedBody,
    discard_rest,
    max_body,
    parse_body,
    refuse,
)
from pdserve.frontend.edge.paths import BY_QUERY, GENERATING, TOKENIZING, WITH_BODY
from pdserve.frontend.edge.request_state import RequestFailure, RequestState, seconds_allowed
from pdserve.frontend.edge.response import REFUSALS, HttpError, ResponseWriter
from pdserve.frontend.keys.auth import ApiKeys, client_of, is_local
from pdserve.frontend.keys.usage import KeyUse
from pdserve.frontend.model.run import admitted, run
from pdserve.frontend.model.served_models import ServedModels
from pdserve.frontend.plugins import FrontendPages, Plugins

logger = logging.getLogger(__name__)


class FrontendApp:
    """Serves all models. Responds from the start, even without a model."""

    def __init__(
        self,
        models: ServedModels,
        keys: ApiKeys,
        plugins: Plugins,
        request_timeout: float,
        max_request_timeout: float = FrontendConfig.max_request_timeout,
    ) -> None:
        self._models = models
        self._keys = keys
        self._plugins = plugins
        self._pages = FrontendPages(models, plugins.routes)
        self._request_timeout = request_timeout
        self._max_request_timeout = max_request_timeout
        self._bodies = BodyReader()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = RequestState(request_id, scope["path"], time.monotonic() + self._request_timeout)
        response = ResponseWriter(send, state)
        try:
            await self._answer(request, response)
        except ClientDisconnect:  # the client left before the body was complete
            pass
        except REFUSALS as error:
            await refuse(request, response, error)
        except Exception:
            logger.exception("%s: the request failed in the frontend", request_id)
            await response.fail(RequestFailure(500, "internal error"))
        finally:
            response.state.release()
            self._plugins.end(response)

    async def _answer(self, request: Request, response: ResponseWriter) -> None:
        state = response.state
        asked = request.headers.get("x-request-timeout")
        timeout = seconds_allowed(asked, self._request_timeout, self._max_request_timeout)
        state.deadline = state.started + timeout
        self._find_key(request, state)
        if state.path in WITH_BODY or BY_QUERY.fullmatch(state.path):
            await self._answer_by_model(request, response)
        elif (bare := state.path.rstrip("/")) != state.path and bare in WITH_BODY | self._pages.paths:
            redirect = RedirectResponse(request.url.replace(path=bare))
            await response.reply(redirect, before_end=partial(discard_rest, request))
        else:
            await self._pages(request.scope, request.receive, response)

    def _find_key(self, request: Request, state: RequestState) -> None:
        needs_no_key = state.path in self._plugins.open_paths or (
            state.path in self._plugins.local_paths and is_local(request.scope)
        )
        if not needs_no_key and (key := self._keys.of(request)):
            state.key = key.name

    async def _answer_by_model(self, request: Request, response: ResponseWriter) -> None:
        """Apply the key's limits, read the body, and forward the request to its model."""
        state, path = response.state, response.state.path
        state.client = client_of(request, state.key)
        by_query = path not in WITH_BODY
        if request.method != "POST" and not by_query:
            state.headers["allow"] = "POST"
            raise HttpError(405, f"{path} takes POST")
        if path in GENERATING:
            self._plugins.begin(request, response)
        # only the body names the model, so the model with the longest context sets the bound
        longest = max((card.max_model_len for card in self._models.known()), default=0)
        most = max_body(longest, tokenizing=path in TOKENIZING)
        with nullcontext() if by_query else KeyUse(self._keys.ledger, response) as use:
            async with self._bodies.read(request, state.deadline, state.client, most) as raw:
                named = request.query_params.get("model") or self._models.any_for(path)
                body = ParsedBody(raw, named, RequestSize(0, None)) if by_query else parse_body(path, raw)
                if path in GENERATING and use is not None:
                    use.reserve(body.size, longest)
                await self._forward(body, request, response)

    async def _forward(self, body: ParsedBody, request: Request, response: ResponseWriter) -> None:
        """Pass the request through its model's admission control to the model's app. Repeat this if another model takes
        the model's name before anything was generated."""
        name = body.model
        while True:
            model, state = self._models.find(name), response.state
            name = state.model = model.card.name
            if not body.is_flex:
                state.promised = model.promised.relaxed(request.headers)
            try:
                with admitted(model, body, state.client, state) as admission:
                    await run(model, admission, body, request, response)
                if not response.redirected:
                    return
            except ModelReplaced:
                if response.ended:
                    return
            logger.info(
                "%s: %s was replaced; forwarding the request to its successor", state.request_id, name
            )
            response.restart()
