"""Plain chunks, which are written without vLLM's app, have the same bytes as the app's chunks."""

import asyncio
import gc
import json
import random
import re
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from pdserve.contract.messages import Failed
from pdserve.frontend.edge.deltas import DeltaStream, is_plain
from pdserve.frontend.sequence.generation import Generation
from tests.conditions import until
from tests.frontend.conftest import MODEL, Graph, address_of, in_session
from tests.frontend.edge.test_sockets import ask, client, read
from tests.frontend.model.echo import EchoWorker, Step
from tests.frontend.test_generate import delta

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hello", "stream": True}
TEXTS = (
    'plain words, "quotes", a back\\slash / slash\n\ttab \r\n',
    "emoji 😀 👩‍👩‍👧‍👦 🇪🇺, Привет, 你好, 世界, \u2028\u2029 \x00\x01\x1f\x7f \ufeff e\u0301",
    '"delta":{"content":"no"} "choices":[{"index":0,"text":"no" "finish_reason":null} data: [DONE]\n\ndata: x',
    "<|im_end|> special <|im_start|> tokens <|endoftext|> inside",
)
NOT_PLAIN = {"priority": 0}
"""a field without effect, unknown to `is_plain`, so that vLLM's app makes every chunk"""


TOKENIZER = AutoTokenizer.from_pretrained(MODEL)

# which requests are plain


PLAIN: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "seed": 1, "user": "me", "n": 1},
    {"logprobs": None, "tools": None, "stream_options": {"include_usage": True}},
    {"prompt": [1, 2, 3]},
]
OTHERS: list[dict[str, Any]] = [
    {"stream_options": {"continuous_usage_stats": True}}, {"stream_options": 1}, {"stream": False}, {"stream": "true"},
    {"n": 2}, {"logprobs": 0}, {"echo": True}, {"tools": []}, {"tool_choice": None}, {"return_token_ids": True},
    {"use_beam_search": True}, {"whatever comes": 1}, {"prompt": ["a"]}, {"prompt": [[1]]}, {"prompt": []},
]  # fmt: skip


@pytest.mark.parametrize("changes", PLAIN + OTHERS)
def test_which_requests_are_plain(changes: dict[str, Any]) -> None:
    assert is_plain({**COMPLETION, **changes}) is (changes in PLAIN)


# vLLM's bytes


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many chunks were written without vLLM's app."""
    count: Counter[str] = Counter()
    write = DeltaStream.write

    def counting(self: DeltaStream, text: str) -> None:
        count["chunks"] += 1
        write(self, text)

    monkeypatch.setattr(DeltaStream, "write", counting)
    return count


class Answer:
    """A streamed response, read while it arrives."""

    def __init__(self, graph: Graph, body: dict[str, Any], **headers: str) -> None:
        self._raw, self._more = bytearray(), asyncio.Event()
        self._chat = "messages" in body
        self._reading = asyncio.create_task(self._read(graph, body, headers))
        self._reading.add_done_callback(lambda _: self._more.set())
        self.over = self._reading.done

    async def _read(self, graph: Graph, body: dict[str, Any], headers: dict[str, str]) -> None:
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        async with graph.http.stream("POST", path, json=body, headers=headers) as answer:
            async for part in answer.aiter_raw():
                self._raw += part
                self._more.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that are JSON objects."""
        lines = self._raw.rpartition(b"\n")[0].splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @property
    def texts(self) -> list[str]:
        return [text for text in map(delta, self.events) if text]

    def _count(self) -> int:
        return self._raw.count(b"\n\ndata:") + bool(self._raw)

    async def step(self, worker: EchoWorker, *, surely: bool = True) -> None:
        """Make a step and wait for its chunks, so that tokens of two steps are not merged. With `surely=False`, the
        step may bring no chunk."""
        begins = self._chat and not self._raw  # a chat's first chunk has the role only
        expected = self._count() + len(worker.jobs) * (1 + begins)
        await worker.step()
        with suppress(TimeoutError):
            async with asyncio.timeout(60 if surely else 0.03):
                while self._count() < expected and not self.over():
                    self._more.clear()
                    await self._more.wait()

    async def whole(self) -> bytes:
        """Return the response with its time of creation set to 0."""
        await self._reading
        return re.sub(rb'"created":\d+', b'"created":0', self._raw)

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def stream(
    graph: Graph, worker: EchoWorker, body: dict[str, Any], *, fail_after: int = 99, surely: bool = True
) -> bytes:
    answer, steps = Answer(graph, body, **{"x-request-id": "same"}), 0
    await worker.until(lambda: len(worker.jobs) == body.get("n", 1) or answer.over())
    while worker.jobs and not answer.over():
        if steps == fail_after:
            for request_id in list(worker.jobs):
                await worker.send(Failed(request_id, "it broke"))
            break
        await answer.step(worker, surely=surely)
        steps += 1
    whole = await answer.whole()
    worker.jobs.clear()
    return whole


async def both(graph: Graph, worker: EchoWorker, body: dict[str, Any], **options: Any) -> bytes:
    ours = await stream(graph, worker, body, **options)
    theirs = await stream(graph, worker, {**body, **NOT_PLAIN}, **options)
    assert ours == theirs, (body, worker.script)
    return ours


def script(text: str, rng: random.Random, finish: FinishReason, stop: int | None = None) -> list[Step]:
    """Return the text in steps of one to three tokens."""
    tokens = TOKENIZER.encode(text)
    steps: list[Step] = []
    while tokens:
        count = rng.choice((1, 1, 1, 2, 3))
        steps.append(Step(tokens[:count]))
        tokens = tokens[count:]
    steps[-1].finish, steps[-1].stop = finish, stop
    return steps


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": ["tab", "Привет", "no"]},
    {"stop": ["inside"], "include_stop_str_in_output": True},
    {"skip_special_tokens": False},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"n": 2, "temperature": 1.0},
    {"echo": True},
]
FINISHES = ((FinishReason.LENGTH, None), (FinishReason.STOP, None), (FinishReason.STOP, 7))


def noise(rng: random.Random) -> list[Step]:
    """Return steps of random tokens."""
    steps = [Step(rng.choices(range(len(TOKENIZER)), k=rng.choice((1, 1, 2)))) for _ in range(12)]
    steps[-1].finish = FinishReason.LENGTH
    return steps


@in_session
@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_plain_chunks_equal_those_of_vllms_app(
    graph: Graph, written: Counter[str], base: dict[str, Any]
) -> None:
    rng, plain = random.Random(5), 0
    async with graph.worker(pace=None) as worker:
        for number, text in enumerate([*TEXTS, *[""] * 8]):
            for at, options in enumerate(OPTIONS if text else rng.sample(OPTIONS, 2)):
                finish, stop = FINISHES[(number + at) % len(FINISHES)]
                worker.script = script(text, rng, finish, stop) if text else noise(rng)
                fails = rng.choice((99, 99, 99, 0, 1, 4))
                before, body = written["chunks"], {**base, **options, "max_tokens": 500}
                answer = await both(graph, worker, body, fail_after=fails)
                if is_plain(body) and b'"finish_reason":"stop"' not in answer:
                    steps = min(fails, len(worker.script) - 1)
                    assert written["chunks"] - before == max(0, steps - 1)  # all but the first and the last
                    plain += 1
                assert fails < len(worker.script) or answer.endswith(b"data: [DONE]\n\n")
    assert plain > 5


@in_session
async def test_a_client_that_pauses_reading_gets_everything(graph: Graph, written: Counter[str]) -> None:
    """When the connection is full, vLLM's app gets the outputs, and merges those that wait."""
    count, usage = 4000, {"include_usage": True}
    async with graph.worker(pace=None) as worker, client(address_of(graph.url), None) as sock:
        worker.script = [Step([300 + number % 600]) for number in range(count)]
        worker.script[-1].finish = FinishReason.LENGTH
        ask(sock, max_tokens=count, stream_options=usage)
        await worker.until(lambda: worker.jobs)
        for _ in range(count - 500):
            await worker.step()
            await asyncio.sleep(0.0002)
        assert 0 < written["chunks"] < count - 1000
        merged = written["chunks"]
        rest = asyncio.create_task(asyncio.to_thread(read, sock))
        while worker.jobs:
            await worker.step()
            await asyncio.sleep(0.001)
        raw = await rest
    assert written["chunks"] > merged  # later chunks are written without the app again
    events = [json.loads(event) for event in re.findall(rb"^data: (\{.*\})\r?$", raw, re.MULTILINE)]
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    assert text == TOKENIZER.decode([token for step in worker.script for token in step.tokens])
    assert events[-1]["usage"]["completion_tokens"] == count


@in_session
async def test_plain_chunks_equal_the_apps_with_a_tool_parser(graph: Graph, written: Counter[str]) -> None:
    """The parser ignores requests without tools. A step that ends within a character brings no chunk."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True}
    async with graph.worker("tools", pace=None, args=tools) as worker:
        for text in (f"{TEXTS[1][:20]}, and words to the end of it", f"a call {call}"):
            worker.script = [Step([token]) for token in TOKENIZER.encode(text)]
            worker.script[-1].finish = FinishReason.STOP
            body = {**CHAT, "model": "tools", "stream_options": {"include_usage": True}}
            before = written["chunks"]
            await both(graph, worker, body, surely=False)
            assert written["chunks"] - before > 10
            with_tools = await stream(graph, worker, {**body, "tool_choice": None}, surely=False)
            assert (b'"tool_calls":[{' in with_tools) == (call in text)


@in_session
async def test_an_output_that_cannot_be_processed_fails_only_its_request(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests before and after the failed one in the step go on. A request that met a stop string is cancelled at the
    worker."""
    before, poisoned, stopped, after = ({**COMPLETION, "max_tokens": 9, "user": name} for name in "abcd")
    stopped["stop"] = TOKENIZER.decode([302])
    async with graph.worker(pace=None) as worker:
        worker.script = [Step([300 + number]) for number in range(6)]
        worker.script[-1].finish = FinishReason.LENGTH
        answers = []
        for number, body in enumerate((before, stopped, poisoned, after), 1):
            answers.append(asyncio.create_task(graph.http.post("/v1/completions", json=body)))
            await worker.until(lambda number=number: len(worker.jobs) == number)
        for _ in range(2):
            await worker.step()
        states = graph.processor().core.fail_request.args[0].output_processor.request_states  # type: ignore[attr-defined]
        monkeypatch.setattr(list(states.values())[2].detokenizer, "update", None)
        await worker.step()
        stopped_id, poisoned_id = list(worker.jobs)[1:3]
        await worker.until(lambda: worker.jobs.keys().isdisjoint({stopped_id, poisoned_id}))
        while worker.jobs:
            await worker.step()
        bodies = [(await answer).text for answer in answers]
    texts = ["".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', body)) for body in bodies]
    assert texts[0] == texts[3]
    assert ['"length"' in body for body in bodies] == [True, False, False, True]
    assert '"finish_reason":"stop"' in bodies[1]
    assert '"code":500' in bodies[2]


@in_session
async def test_an_output_that_cannot_be_processed_cancels_all_outputs_of_its_request(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with graph.worker(pace=None) as worker:
        worker.script = [Step([300 + number]) for number in range(6)]
        answer = asyncio.create_task(
            graph.http.post("/v1/completions", json={**COMPLETION, "n": 2, "temperature": 1})
        )
        await worker.until(lambda: len(worker.jobs) == 2)
        states = graph.processor().core.fail_request.args[0].output_processor.request_states  # type: ignore[attr-defined]
        monkeypatch.setattr(next(iter(states.values())).detokenizer, "update", None)
        await worker.step()
        await worker.until(lambda: not worker.jobs)
        assert (await answer).status_code == 500


@in_session
async def test_a_finished_request_is_freed_without_garbage_collection(graph: Graph) -> None:
    """Prompts are large, and collections are rare."""
    kinds = (RequestState, Generation)
    async with graph.worker():
        gc.collect()
        gc.disable()
        try:
            for changes in ({}, NOT_PLAIN):
                await graph.http.post("/v1/completions", json={**COMPLETION, **changes, "max_tokens": 5})
            await until(lambda: not any(isinstance(found, kinds) for found in gc.get_objects()))
        finally:
            gc.enable()
