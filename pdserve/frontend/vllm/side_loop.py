"""Side loop: vLLM's app runs large requests on an event loop in a thread.

The app does much of its work between two awaits: a response with the logprobs of 4,000 tokens takes seconds. On the
frontend's loop, all other requests would wait meanwhile, and leases would expire. While a thread does the work, the
frontend's loop runs every few milliseconds. The connection (`receive`, `send`) and the engine (`generate`) stay on the
frontend's loop. Wraps private methods of vLLM's AsyncLLM, input processor, renderer and logprobs processor
(`tests/frontend/vllm/test_api_server.py` checks them).
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.logprobs import PromptLogprobs, create_prompt_logprobs
from vllm.outputs import RequestOutput
from vllm.renderers.base import BaseRenderer
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsTensors

from pdserve.runtime.tasks import Lifetime, run_on_loop

T = TypeVar("T")
Outputs = AsyncGenerator[RequestOutput, None]
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_validated: ContextVar[tuple[object, bool | None]] = ContextVar("validated", default=(None, None))
"""Parameters that were validated in the thread, and the result of vLLM's validation."""

SHORT_PROMPT = 1000
"""Characters of the longest prompt that is tokenized in the event loop; that takes about 0.2 ms."""


class SideLoop(Lifetime):
    """An event loop in a thread, while entered."""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._home = asyncio.get_running_loop()
        started = asyncio.Event()
        thread = threading.Thread(target=asyncio.run, args=(self._run(started),), daemon=True)
        thread.start()
        await started.wait()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(thread.join)

    async def _run(self, started: asyncio.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._home.call_soon_threadsafe(started.set)
        await self._stop.wait()

    def app(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app so that it runs in the thread, while `receive` and `send` run on the frontend's loop."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_at_home() -> Message:
                return await run_on_loop(self._home, receive())

            async def send_at_home(message: Message) -> None:
                await run_on_loop(self._home, send(message))

            await run_on_loop(self._loop, app(scope, receive_at_home, send_at_home))

        return answer

    def wrap_generate(self, engine: AsyncLLM) -> None:
        """Make `engine.generate` callable from the thread. Parameters are validated in the thread, because
        validation compiles grammars."""
        generate_at_home, inputs = engine.generate, engine.input_processor
        validate = inputs._validate_params

        def validated(params: object, *rest: Any) -> bool | None:
            known, result = _validated.get()
            return result if known is params else validate(params, *rest)

        async def from_thread(params: object, outputs: Outputs) -> Outputs:
            tasks = await run_on_loop(self._home, engine.get_supported_tasks())
            _validated.set((params, validate(params, tasks)))
            while (output := await run_on_loop(self._home, anext(outputs, None))) is not None:
                _make_logprobs(output)
                try:
                    yield output
                except GeneratorExit:
                    await run_on_loop(self._home, outputs.aclose())
                    raise

        def generate(prompt: object, params: object, *args: Any, **options: Any) -> Outputs:
            outputs = generate_at_home(prompt, params, *args, **options)
            if asyncio.get_running_loop() is not self._home:
                return from_thread(params, outputs)
            return outputs if getattr(params, "prompt_logprobs", None) is None else _with_logprobs(outputs)

        inputs._validate_params, engine.generate = validated, generate


def tokenize_short_prompts_inline(renderer: BaseRenderer[Any]) -> None:
    """Tokenize short prompts in the event loop, because waking a thread and the loop again costs more."""
    in_thread = renderer._tokenize_prompt_async

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT_PROMPT:
            return renderer._tokenize_prompt(prompt, params)
        return await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize


async def _with_logprobs(outputs: Outputs) -> Outputs:
    async with aclosing(outputs):
        async for output in outputs:
            _make_logprobs(output)
            yield output


def _make_logprobs(output: RequestOutput) -> None:
    if isinstance(output.prompt_logprobs, LaterLogprobs):
        output.prompt_logprobs = output.prompt_logprobs.made()


class LaterLogprobs:
    """Prompt logprobs as the engine sent them, made into objects only when the response is written. vLLM would make
    them at once for each of `n` outputs, at 7 µs per logprob, and use only the last output's."""

    def __init__(self, tokenizer: TokenizerLike | None, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self.parts: list[LogprobsTensors] = []

    def made(self) -> PromptLogprobs:
        whole = LogprobsProcessor(
            self._tokenizer, None, create_prompt_logprobs(False), None, None, self._count
        )
        for part in self.parts:
            whole._update_prompt_logprobs(part)
        return whole.prompt_logprobs


def keep_prompt_logprobs(processor: OutputProcessor, output: EngineCoreOutput) -> None:
    """Move the prompt's logprobs from the output to a `LaterLogprobs`."""
    part, output.new_prompt_logprobs_tensors = output.new_prompt_logprobs_tensors, None
    if (state := processor.request_states.get(output.request_id)) is None:
        return
    logprobs = state.logprobs_processor
    if not isinstance(logprobs.prompt_logprobs, LaterLogprobs):
        logprobs.prompt_logprobs = LaterLogprobs(logprobs.tokenizer, logprobs.num_prompt_logprobs)
    logprobs.prompt_logprobs.parts.append(part)


class JsonInPieces(JSONResponse):
    """JSONResponse that in the side thread uses Python's encoder, because the C encoder holds the interpreter until it
    is done."""

    def render(self, content: Any) -> bytes:
        if threading.current_thread() is threading.main_thread():
            return super().render(content)
        return "".join(_encoder.iterencode(content)).encode()


def _dump_choices_apart(model: Any) -> None:
    whole = model.model_dump

    def model_dump(self: Any, **options: Any) -> dict[str, Any]:
        choices = [choice.model_dump(**options) for choice in self.choices]
        return {**whole(self.model_copy(update={"choices": []}), **options), "choices": choices}

    model.model_dump = model_dump


for routes in (completion_routes, chat_routes, response_routes):
    routes.JSONResponse = JsonInPieces
for model in (CompletionResponse, ChatCompletionResponse):
    _dump_choices_apart(model)
