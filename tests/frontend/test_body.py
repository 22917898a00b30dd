import pytest

from pdserve.errors import BadRequest
from pdserve.frontend.body import max_body, parse_body

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("tokens", "tokenizing", "expected"),
    [
        (4096, False, 4456448),
        (4096, True, 393216),
        (131072, False, 12582912),
        (131072, True, 4456448),
        (10_000_000, False, 32 << 20),
        (10_000_000, True, 32 << 20),
    ],
)
def test_max_body(tokens: int, tokenizing: bool, expected: int) -> None:
    assert max_body(tokens, tokenizing=tokenizing) == expected


@pytest.mark.parametrize(
    ("path", "body", "max_tokens", "sequences"),
    [
        ("completions", b'{"prompt": "a"}', None, 1),
        ("completions", b'{"prompt": "a", "max_tokens": 5}', 5, 1),
        ("chat/completions", b'{"messages": [], "max_tokens": 9, "max_completion_tokens": 5}', 5, 1),
        ("chat/completions", b'{"messages": [], "max_tokens": 9}', 9, 1),
        ("messages", b'{"messages": [], "max_tokens": 9, "max_completion_tokens": 1}', 9, 1),
        ("completions", b'{"prompt": "a", "max_tokens": 9, "max_output_tokens": 1}', 9, 1),
        ("responses", b'{"input": "a", "max_tokens": 1}', None, 1),
        ("responses", b'{"input": "a", "max_output_tokens": 7}', 7, 1),
        ("completions", b'{"prompt": ["a", "b"], "n": 3}', None, 6),
        ("completions", b'{"prompt": [[1, 2], [3]]}', None, 2),
        ("completions", b'{"prompt": [1, 2, 3]}', None, 1),
        ("completions", b'{"prompt": [], "n": true, "max_tokens": "x"}', None, 1),
        ("completions", b'{"n": -4, "max_tokens": 0}', None, 1),
        ("completions", b'{"n": "4", "max_tokens": 5.0}', 5, 4),
        ("completions", b'{"n": 1e300, "max_tokens": "\xd9\xa3"}', 3, 1 << 40),
        ("completions", b'{"n": 1%b}' % (b"0" * 4299), None, 1 << 40),
        ("chat/completions", b'{"messages": [[], [], []]}', None, 3),
        ("chat/completions", b'{"messages": [{}, {}]}', None, 1),
    ],
)
def test_the_size_of_a_request(path: str, body: bytes, max_tokens: int | None, sequences: int) -> None:
    size = parse_body(f"/v1/{path}", body).size
    assert (size.prompt_tokens, size.max_tokens, size.sequences) == (len(body) // 4, max_tokens, sequences)


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN, "kv_transfer_params": {}}',
        b'{"user": "\\ud800", "kv_transfer_params": {}}',
        '{"kv_transfer_params": {}}'.encode("utf-16"),
        b'\xef\xbb\xbf{"kv_transfer_params": {}}',
        b'{"seed": 1e999, "kv_transfer_params": {}}',
    ],
)
def test_what_only_python_reads_is_read_as_well(body: bytes) -> None:
    with pytest.raises(BadRequest, match="kv_transfer_params"):
        parse_body(CHAT, body)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 10_000, b'{"model": 5}'])
def test_what_names_no_model_is_left_to_the_app(body: bytes) -> None:
    assert parse_body(CHAT, body).model is None


def test_structured_outputs_that_are_no_object_are_refused() -> None:
    """vLLM 0.32 would answer 500."""
    with pytest.raises(BadRequest, match="must be an object"):
        parse_body(CHAT, b'{"structured_outputs": "json"}')
    assert parse_body(CHAT, b'{"structured_outputs": {"regex": "a"}}').model is None
