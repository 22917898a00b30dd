"""What /v1/responses needs of vLLM 0.32: its app keeps responses in `stored`, and its objects become bytes.

`tests/frontend/model/test_vllm_api.py` checks what this expects of vLLM. Import it as late as `vllm_api`.
"""

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import vllm.envs
from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse, StreamingResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMClientError
from vllm.renderers.online_renderer import OpenAIMessage

from pdserve.errors import BadRequest
from pdserve.frontend.model.stored import StoredResponses

vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE = False  # it never forgets, and warns of it


def store_responses(
    serving: OpenAIServingResponses | None, stored: StoredResponses | None, model: str
) -> None:
    """Let vLLM's app keep responses in `stored`, or nowhere."""
    if serving is None or stored is None:
        return
    ours = stored.of_model(model, ResponseJson())
    serving.enable_store = True
    serving.response_store_lock = ours
    serving.response_store, serving.msg_store = ours.responses, ours.messages
    serving.event_store, serving.background_tasks = ours.events, ours.tasks


def raising_refusals(app: FastAPI) -> ASGIApp:
    """vLLM's app, raising BadRequest if it refuses a request after its answer has begun."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except RuntimeError as error:  # starlette's, since the answer has begun
            if isinstance(error.__cause__, VLLMClientError):
                raise BadRequest(str(error.__cause__)) from error
            raise

    return answer


class ResponseJson:
    """vLLM's objects as bytes, and back."""

    def dump(self, response: ResponsesResponse) -> bytes:
        return cast(bytes, response.model_dump_json(by_alias=True).encode())

    def load(self, data: bytes) -> ResponsesResponse:
        return ResponsesResponse.model_validate_json(data)

    def dump_messages(self, messages: Sequence[Any]) -> bytes:
        """gpt-oss has Harmony's messages, all other models dicts."""
        plain = [message.to_dict() if isinstance(message, OpenAIMessage) else message for message in messages]
        harmony = any(isinstance(message, OpenAIMessage) for message in messages)
        return msgspec.json.encode({"harmony": harmony, "messages": jsonable_encoder(plain)})

    def load_messages(self, data: bytes) -> list[Any]:
        stored = msgspec.json.decode(data)
        messages: list[Any] = stored["messages"]
        return [OpenAIMessage.from_dict(message) for message in messages] if stored["harmony"] else messages

    def dump_event(self, event: StreamingResponsesResponse) -> str:
        return cast(str, event.model_dump_json(indent=None, by_alias=True))
