"""Errors of vLLM's app and of `frontend/edge` have the shape of their route. A client's fault logs no traceback."""

import gzip
import json

import httpx
import pytest

from pdserve.config.api_keys import ApiKey
from pdserve.frontend.edge.response import with_one_shape
from pdserve.frontend.keys.auth import ApiKeys
from tests.frontend.conftest import Graph, in_session
from tests.frontend.test_generate import chat

OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
SURROGATE = (
    b'{"model": "demo", "max_tokens": 1, "prompt": "\\ud800", "input": "\\ud800", '
    b'"messages": [{"role": "user", "content": "\\ud800"}]}'
)


def ask(**changes: object) -> bytes:
    """Return a body that the routes of `OPENAI` and `ANTHROPIC` accept."""
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
    "a long head": (ask(), {"x": "y" * 70_000}, 431),
}
"""Requests that `frontend/edge` refuses. The other errors are in tests/conformance/routes/test_errors.py."""


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


@in_session
@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
async def test_an_error_has_the_shape_of_its_route(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    found, key = dict[str, int](), {"content-type": "application/json", "authorization": "Bearer a-key"}
    monkeypatch.setattr(graph.app, "_keys", ApiKeys([ApiKey.of("a-key", "alice")]))
    async with graph.worker():
        for name, (content, headers, _) in WRONG.items():
            answer = await graph.http.post(path, content=content, headers=key | headers)
            found[name] = answer.status_code
            check_shape(path, answer)
    assert found == {name: status for name, (_, _, status) in WRONG.items()}
    assert "Traceback" not in "".join(capfd.readouterr())
    monkeypatch.setattr(graph.models, "find", None)  # an unexpected error in `frontend/edge`
    answer = await graph.http.post(path, content=ask(), headers=key)
    assert answer.status_code == 500
    check_shape(path, answer)


@pytest.mark.parametrize(
    ("path", "status", "body", "expected"),
    [
        ("completions", 504, b'{"error":{"type":"Late","code":504}}', b'{"error":{"type":"TimeoutError","code":504}}'),
        ("completions", 0, b'data: {"error":{"type":"Bad","code":400}}\n\n', None),
        ("completions", 0, b'data: {"error":{"type":"Gone","code":503}}\n\n',
         b'data: {"error":{"type":"ServiceUnavailableError","code":503}}\n\n'),
        ("completions", 418, b'{"error":{"type":"Strange","code":418}}', None),
        ("completions", 400, b'{"error":"text"}', None),
        ("completions", 0, b'data: {"error" is no JSON', None),
        ("completions", 500, b"[1]", None),
        ("messages", 400, b'{"type": "error", "error": {"type": "BadRequestError", "message": "\\u00e9"}}', None),
    ],
)  # fmt: skip
def test_an_error_of_vllms_app_has_the_type_of_its_status(
    path: str, status: int, body: bytes, expected: bytes | None
) -> None:
    """`expected` None: the body stays unchanged. `status` 0: the body is an event of a stream."""
    assert with_one_shape(f"/v1/{path}", body, status) == (expected or body)
