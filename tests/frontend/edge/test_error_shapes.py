"""Each error has its route's shape, made by vLLM's app or by the edge; and what a client did wrong is no traceback."""

import gzip
import json

import httpx
import pytest

from pdserve.config.api_keys import ApiKey
from pdserve.frontend.keys.auth import ApiKeys
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
SURROGATE = (
    b'{"model": "demo", "max_tokens": 1, "prompt": "\\ud800", "input": "\\ud800", '
    b'"messages": [{"role": "user", "content": "\\ud800"}]}'
)


def ask(**changes: object) -> bytes:
    """A body for all of these routes."""
    body = {**chat(), "prompt": "x", "input": "x", **changes}
    return json.dumps({name: value for name, value in body.items() if value}).encode()


WRONG: dict[str, tuple[bytes, dict[str, str], int]] = {
    "gzip": (gzip.compress(ask()), {"content-encoding": "gzip"}, 400),
    "no JSON": (b"{", {}, 400),
    "UTF-16, cut": (b"\xff\xfe{\x00}\x00", {}, 400),
    "half of a character": (SURROGATE, {}, 400),
    "another model": (ask(model="no-such-model"), {}, 404),
    "a wrong deadline": (ask(), {"x-request-timeout": "soon"}, 400),
    "too large": (b" " * (33 << 20), {}, 413),
    "a wrong key": (ask(), {"authorization": "Bearer wrong"}, 401),
}
"""what the edge answers by itself, or was a traceback once; the others are in tests/conformance/test_errors.py"""


def check_shape(path: str, answer: httpx.Response) -> None:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    if path in ANTHROPIC:
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["code"] == answer.status_code
    assert body["error"]["message"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
async def test_an_error_has_the_shape_of_its_route(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str, wrong: str
) -> None:
    content, headers, status = WRONG[wrong]
    monkeypatch.setattr(graph.app, "_keys", ApiKeys([ApiKey.of("a-key", "alice")]))
    headers = {"content-type": "application/json", "authorization": "Bearer a-key"} | headers
    async with graph.worker():
        answer = await graph.http.post(path, content=content, headers=headers)
    assert answer.status_code == status
    check_shape(path, answer)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
async def test_an_error_of_the_edge_itself_has_it_too(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(graph.models, "find", None)
    answer = await graph.http.post(path, content=ask())
    assert answer.status_code == 500
    check_shape(path, answer)
    long = await graph.http.post(path, content=ask(), headers={"x": "y" * 70_000})
    assert long.status_code == 431
    check_shape(path, long)
