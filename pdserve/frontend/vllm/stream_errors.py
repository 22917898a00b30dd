"""Report errors of vLLM's streams to the edge, with the status that the same request gets without `stream`.

vLLM starts a stream with status 200 before it checks the parameters; an error follows as an event, from which
Anthropic's route removes the status. Here the error is recorded in the request state. If the client has got nothing
yet, `edge/response.py` responds with the error's status; logs, metrics and receipts always get that status.
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
    """Record errors of streams in the request state. /v1/responses raises its errors instead; the returned app turns
    client errors into HttpError."""
    state = app.state
    for serving in (
        state.openai_serving_chat,
        state.openai_serving_completion,
        state.anthropic_serving_messages,
    ):
        if serving is not None:
            serving.create_streaming_error_response = _recorded(serving.create_streaming_error_response)
    for name in _LOGGERS:
        logging.getLogger(f"vllm.entrypoints.{name}").addFilter(_is_server_error)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            # once the response has begun, starlette raises RuntimeError from the error
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            found = create_error_response(cause if isinstance(cause, Exception) else error).error
            if found.code >= 500:
                raise
            raise HttpError(found.code, found.message, found.param) from error

    return answer


def _recorded(make: Callable[..., str]) -> Callable[..., str]:
    """Wrap a function that returns the JSON of an error event."""

    def create_streaming_error_response(*args: object, **options: object) -> str:
        event, state = make(*args, **options), current_request.get()
        if state is not None and state.failure is None:
            error = json.loads(event)["error"]
            state.failure = RequestFailure(error["code"], error["message"], param=error["param"])
        return event

    return create_streaming_error_response


def _is_server_error(record: logging.LogRecord) -> bool:
    """Log filter: drops client errors with a traceback, because vLLM's tracebacks quote the request."""
    return not record.exc_info or create_error_response(cast(Exception, record.exc_info[1])).error.code >= 500
