"""Run a request: enter the model's admission control, wait for its turn, and let the model's app respond."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from starlette.requests import Request

from pdserve.frontend.admission.granted import Admission, ModelReplaced
from pdserve.frontend.edge.body import ParsedBody, app_scope, max_body, replay
from pdserve.frontend.edge.connections import CHUNKS, UNREAD
from pdserve.frontend.edge.deltas import DeltaStream
from pdserve.frontend.edge.paths import GENERATING, TOKENIZING
from pdserve.frontend.edge.request_state import (
    LOADING,
    NO_WORKER,
    SHUTTING_DOWN,
    RequestFailure,
    RequestState,
    current_request,
)
from pdserve.frontend.edge.response import REFUSALS, HttpError, ResponseWriter
from pdserve.frontend.model.served_model import ServedModel

logger = logging.getLogger(__name__)

LONG_TEXT = 64 << 10
"""Bytes of a tokenization request's body above which such requests run one at a time."""
GRACE = 0.3
"""Seconds after the deadline in which the model's app may still send its own, more exact error."""
_END_TIMEOUT = 5.0
"""Seconds for the model's app to end after a disconnect."""


@contextmanager
def admitted(model: ServedModel, body: ParsedBody, client: str, state: RequestState) -> Iterator[Admission]:
    """Enter the model's admission control, in which `run` waits, and leave it at the end. Raises REFUSALS."""
    most = max_body(model.card.max_model_len, tokenizing=state.path in TOKENIZING)
    if len(body.raw) > most:
        raise HttpError(413, f"the request body is larger than {most} bytes")
    if state.path in GENERATING:
        if model.is_loading:
            state.hops.released()  # it may have been held because no decode worker had registered
            state.hops.held(LOADING)
        state.hops.held("" if model.usable_workers else NO_WORKER)
        size = body.size.within(model.card.max_model_len)
        admission = model.admission.enter(client, size, state.deadline, is_flex=body.is_flex)
        state.admission = admission
    else:
        admission = model.admission.bypass(client)
    try:
        yield admission
    finally:
        model.admission.leave(admission)


async def run(
    model: ServedModel, admission: Admission, body: ParsedBody, request: Request, response: ResponseWriter
) -> None:
    """Let the model's app respond until the client leaves or the deadline passes. Raises REFUSALS and ModelReplaced."""
    state, left = response.state, asyncio.Event()
    current_request.set(state)
    extensions = request.scope.setdefault("extensions", {})
    extensions[UNREAD], state.has_tools = admission.set_unread, body.has_tools
    if body.is_plain and CHUNKS in extensions:
        state.deltas = DeltaStream(extensions[CHUNKS])

    async def answer() -> None:
        await admission.wait()
        state.hops.released()
        is_long = state.path in TOKENIZING and len(body.raw) > LONG_TEXT
        async with model.admission.long_text(admission.client) if is_long else nullcontext():
            processor = await model.ready()
            app = processor.aside if body.is_large else processor.app
            await app(app_scope(request, state.request_id, body), replay(body.raw, left), response)

    app = asyncio.create_task(answer())
    watch = asyncio.create_task(_disconnected(request))
    seconds = state.deadline + GRACE - time.monotonic()
    try:
        done, _ = await asyncio.wait({app, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            late = RequestFailure(504, "the request's deadline passed")
            absent = not model.usable_workers and (admission.waiting or not model.card.model)
            failure = RequestFailure.no_worker(state.model) if absent else late
            with suppress(TimeoutError):  # a client that reads too slowly may block it
                await asyncio.wait_for(response.fail(failure), GRACE)
        if app not in done:
            response.disconnect()
    except asyncio.CancelledError:  # the drain timeout is over; this task ends with the response
        await response.fail(SHUTTING_DOWN)
    finally:
        watch.cancel()
        left.set()  # not `app.cancel`: vLLM's handlers would leave their inner tasks behind
        if admission.waiting:
            app.cancel()
        await _finish(app, response)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _finish(app: "asyncio.Task[None]", response: ResponseWriter) -> None:
    """Wait until the model's app has ended after the disconnect; cancel it after a timeout."""
    await asyncio.wait({app}, timeout=_END_TIMEOUT)
    app.cancel()
    try:
        with suppress(asyncio.CancelledError):
            await app
    except (*REFUSALS, ModelReplaced):
        raise
    except Exception:
        if response.state.failure is None:
            logger.exception("the model's app failed")
            response.state.failure = RequestFailure(500, "internal error")
        if not response.redirected:
            await response.fail(response.state.failure)
