import json
import time

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from pdserve.frontend.edge.body import IMAGE_TOKENS, LARGE, MANY, MAX_PARTS, max_body, parse_body
from pdserve.frontend.edge.paths import GENERATING
from pdserve.util.errors import BadRequest

CHAT = "/v1/chat/completions"


def test_the_bound_of_a_body_grows_with_the_context_up_to_32_mib() -> None:
    contexts = (4096, 131072, 10_000_000)
    assert [max_body(each, tokenizing=False) for each in contexts] == [4456448, 12582912, 32 << 20]
    assert [max_body(each, tokenizing=True) for each in contexts] == [393216, 4456448, 32 << 20]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("chat/completions", b'{"messages": [], "max_tokens": 9, "max_completion_tokens": 5}', (5, 1)),
        ("chat/completions", b'{"messages": [], "max_tokens": 9}', (9, 1)),
        ("messages", b'{"messages": [], "max_tokens": 9, "max_completion_tokens": 1}', (9, 1)),
        ("completions", b'{"prompt": "a", "max_tokens": 9, "max_output_tokens": 1}', (9, 1)),
        ("responses", b'{"input": "a", "max_tokens": 1}', (None, 1)),
        ("responses", b'{"input": "a", "max_output_tokens": 7}', (7, 1)),
        ("completions", b'{"prompt": ["a", "b"], "n": 3}', (None, 6)),
        ("completions", b'{"prompt": [[1, 2], [3]]}', (None, 2)),
        ("completions", b'{"prompt": [1, 2, 3]}', (None, 1)),
        ("completions", b'{"prompt": [], "n": true, "max_tokens": "x"}', (None, 1)),
        ("completions", b'{"n": -4, "max_tokens": 0}', (None, 1)),
        ("completions", b'{"n": 1%b}' % (b"0" * 4299), (None, 1 << 40)),
        ("chat/completions", b'{"messages": [[], [], []]}', (None, 3)),
        ("chat/completions", b'{"messages": [{}, {}], "items": ["a", "b"]}', (None, 1)),
    ],
)
def test_size_has_the_tokens_and_sequences_asked_for(
    path: str, body: bytes, expected: tuple[int | None, int]
) -> None:
    size = parse_body(f"/v1/{path}", body).size
    assert (size.max_tokens, size.sequences) == expected
    assert size.prompt_tokens == len(body) // 4


BASE64 = "A" * 400_000


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("chat/completions", {"type": "image_url", "image_url": {"url": BASE64}}),
        ("chat/completions", {"image_url": BASE64}),
        ("responses", {"type": "input_image", "image_url": BASE64}),
        ("messages", {"type": "image", "source": {"type": "base64", "data": BASE64}}),
        ("messages", {"type": "tool_result", "content": [{"type": "image", "source": {"data": BASE64}}]}),
    ],
)
def test_an_image_counts_as_its_tokens(path: str, part: dict[str, object]) -> None:
    """The image's base64 would count as more tokens than some keys have per minute."""
    fields = {"input" if path == "responses" else "messages": [{"role": "user", "content": [part, part]}]}
    size = parse_body(f"/v1/{path}", json.dumps(fields).encode()).size
    assert 2 * IMAGE_TOKENS < size.prompt_tokens < 2 * IMAGE_TOKENS + 100


@pytest.mark.parametrize(
    "part", [{"type": "text", "text": BASE64}, {"source": BASE64}, {"type": "image", "source": 1}]
)
def test_a_part_that_is_no_image_counts_as_text(part: dict[str, object]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [part, "image"]}]}).encode()
    assert parse_body(CHAT, body).size.prompt_tokens == len(body) // 4


@pytest.mark.parametrize("items", [["a"] * 5000, [[300]] * 5000])
def test_each_scored_item_is_an_output_of_one_token(items: list[object]) -> None:
    size = parse_body("/generative_scoring", json.dumps({"query": "a" * 4000, "items": items}).encode()).size
    assert (size.sequences, size.max_tokens, size.several) == (5000, 1, "items")
    assert size.prompt_tokens > 5000 * 1000  # the query is in each prompt


@pytest.mark.parametrize(
    "spelled", [500, 500.0, True, "500", "+500", "5_00", "500.0", " 500\n", "0500", "+5_00.00"]
)
def test_a_number_is_read_as_vllm_reads_it(spelled: object) -> None:
    asked = CompletionRequest(prompt="a", n=spelled, max_tokens=spelled)
    size = parse_body("/v1/completions", json.dumps({"n": spelled, "max_tokens": spelled}).encode()).size
    assert (size.n, size.max_tokens) == (asked.n, asked.max_tokens)


@pytest.mark.parametrize(
    "spelled", ["500.5", "5__00", "0x10", "5e2", "\u0665", "\uff15", "", "+", 1e300, "9" * 5000]
)
def test_a_number_that_vllm_refuses_counts_as_the_default(spelled: object) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="a", n=spelled)
    size = parse_body("/v1/completions", json.dumps({"n": spelled, "max_tokens": spelled}).encode()).size
    assert (size.n, size.max_tokens) == (1, None)


@pytest.mark.parametrize("part", [b"{}", b"[1]", b'{"role": "user"}'])
def test_a_body_of_too_many_parts_is_refused(part: bytes) -> None:
    few, many = (
        b'{"messages": [%b]}' % b",".join([part] * count) for count in (MAX_PARTS - 2, MAX_PARTS - 1)
    )
    parse_body(CHAT, few)
    with pytest.raises(BadRequest, match="one request may have 10000"):
        parse_body(CHAT, many)


def test_an_unterminated_string_is_parsed_as_fast_as_others() -> None:
    took = []
    for end in (b"", b'"'):
        begun = time.process_time()
        with pytest.raises(BadRequest, match="lists and objects"):
            parse_body(CHAT, b"[" * (MAX_PARTS + 1) + b'"' + b'\\"' * 20_000 + b"\\\n" + end)
        took.append(time.process_time() - begun)
    assert took[0] < 10 * took[1] + 0.1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_parts_are_counted_in_other_encodings(encoding: str) -> None:
    """In these encodings, a byte of U+2200 equals a quote."""
    with pytest.raises(BadRequest, match="lists and objects"):
        parse_body(CHAT, f'{{"\u2200": [{"[]," * MAX_PARTS}[]]}}'.encode(encoding))


def test_brackets_in_a_string_are_no_parts() -> None:
    parse_body(CHAT, json.dumps({"messages": [{"content": '{["\\\\' * MAX_PARTS}]}).encode())


@pytest.mark.parametrize(
    ("fields", "large", "of_prompt"),
    [
        ({"prompt": "a" * (LARGE + 1)}, True, 0),
        ({"messages": [{}] * (MANY + 1)}, True, 0),
        ({"logprobs": True}, True, 0),
        ({"logprobs": 0}, True, 0),
        ({"logprobs": False, "prompt_logprobs": None}, False, 0),
        ({"prompt_logprobs": 1}, True, 1),
        ({"prompt_logprobs": "5", "n": 3}, True, 15),
        ({"top_logprobs": 5}, True, 0),
        ({"logprobs": 5, "stream": True}, False, 0),
        ({"logprobs": 5, "stream": True, "echo": True}, True, 5),
        ({"logprobs": 5, "stream": "off"}, True, 0),
    ],
)
def test_requests_that_would_block_the_event_loop_are_large(
    fields: dict[str, object], large: bool, of_prompt: int
) -> None:
    """`of_prompt`: logprobs per prompt token, summed over all outputs. They count in the size."""
    body = parse_body("/v1/completions", json.dumps({"user": "a" * 40, **fields}).encode())
    assert body.is_large is large
    assert body.size.logprobs == of_prompt * body.size.prompt_tokens


@pytest.mark.parametrize("given", ["", "x" * 129, "a\nb", "a\x1b[2Jb", "a b", "\ud800", "\xe9", "a/b"])
def test_an_id_that_is_long_or_odd_is_refused(given: str) -> None:
    """Each output and each log line repeats the id."""
    for path in GENERATING:
        with pytest.raises(BadRequest, match="request_id must") as refused:
            parse_body(path, json.dumps({"request_id": given}).encode())
        assert refused.value.param == "request_id"


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
def test_json_that_only_python_accepts_is_checked_too(body: bytes) -> None:
    with pytest.raises(BadRequest, match="kv_transfer_params"):
        parse_body(CHAT, body)


@pytest.mark.parametrize("given", ["x" * 128, "cmpl-1.2:3_A", None, 5, ["a"]])
def test_an_id_that_is_plain_or_no_string_is_left_to_the_app(given: object) -> None:
    parse_body(CHAT, json.dumps({"request_id": given}).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 10_000, b'{"model": 5}'])
def test_a_body_without_a_model_is_left_to_the_app(body: bytes) -> None:
    assert parse_body(CHAT, body).model is None
