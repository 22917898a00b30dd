"""Errors of vLLM's streams, reported to the edge with the status that the same request has without `stream`.

vLLM sends the status of a stream, 200, before the engine client checks the parameters. An error follows as an event,
from which Anthropic's route removes the status. The edge (`edge/response.py`) makes the event the whole answer if
nothing was sent yet, and the log, the metrics and the receipt have its status.
"""

import json
import logging
from collections.abc import Callable
from typing import cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from pdserve.frontend.edge.request_state import RequestFailure, current_request
from pdserve.frontend.edge.response import HttpError

_LOGGERS = (
    "openai.chat_completion.serving",
    "openai.completion.serving",
    "anthropic.serving",
    "anthropic.api_router",
)


def report_errors(app: FastAPI) -> ASGIApp:
    """Record errors of streams in the request's state. /v1/responses raises them instead: the app returned raises
    HttpError for those that are the client's."""
    state = app.state
    for serving in (
        state.openai_serving_chat,
        state.openai_serving_completion,
        state.anthropic_serving_messages,
    ):
        if serving is not None:
            serving.create_streaming_error_response = _recorded(serving.create_streaming_error_response)
    for name in _LOGGERS:
        logging.getLogger(f"vllm.entrypoints.{name}").addFilter(_is_no_clients_fault)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            # starlette raises RuntimeError from it when the answer has begun
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            found = create_error_response(cause if isinstance(cause, Exception) else error).error
            if found.code >= 500:
                raise
            raise HttpError(found.code, found.message, found.param) from error

    return answer


def _recorded(make: Callable[..., str]) -> Callable[..., str]:
    """`make` returns the JSON of an error event."""

    def create_streaming_error_response(*args: object, **options: object) -> str:
        event, state = make(*args, **options), current_request.get()
        if state is not None and state.failure is None:
            error = json.loads(event)["error"]
            state.failure = RequestFailure(error["code"], error["message"], param=error["param"])
        return event

    return create_streaming_error_response


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    """vLLM logs errors of streams and of Anthropic's routes with a traceback, which quotes the request."""
    return not record.exc_info or create_error_response(cast(Exception, record.exc_info[1])).error.code >= 500
