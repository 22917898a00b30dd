"""Handwritten hostile requests with the statuses that they may get: earlier findings and known attacks that random
fuzzing rarely hits. Malformed HTTP heads are in tests/frontend/edge/test_hostile.py."""

import gzip
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pdserve_bench.fuzz.request import FuzzRequest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, TOKENIZE = "/v1/messages", "/tokenize"
OK, BAD, EITHER = (200,), (400,), (200, 400)
LARGE = (400, 413)
NOWHERE = "http://127.0.0.1:1/x"
"""An address without a listener, so that a server that fetches it fails visibly."""
TEMPLATE = "{% for i in range(99999999) %}x{% endfor %}"


def hostile_requests(model: str) -> list[FuzzRequest]:
    """Return all requests; their names are unique."""
    kinds = (_bodies, _grammars, _fetching, _headers, _spellings, _routes)
    return [request for kind in kinds for request in kind(model)]


def streamed(requests: Iterable[FuzzRequest]) -> Iterator[FuzzRequest]:
    """Yield each JSON request to a streaming route with `stream: true`. Its `twin` is the original: send that first."""
    for each in requests:
        with suppress(ValueError, RecursionError):
            body = json.loads(each.raw)
            if each.path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES) and isinstance(body, dict):
                raw, name = json.dumps({**body, "stream": True}).encode(), f"{each.name}, streamed"
                yield replace(each, name=name, raw=raw, twin=each.name, expected=None)


def unfinished(requests: Iterable[FuzzRequest], seed: int) -> list[FuzzRequest]:
    """Return the requests from clients that disconnect at a random time."""
    dice = random.Random(seed)
    return [replace(each, leaves=dice.choice((0.1, 1.0)) * dice.random()) for each in requests]


def _json(name: str, path: str, body: Mapping[str, Any], expected: Collection[int]) -> FuzzRequest:
    return _raw(name, json.dumps(body).encode(), *expected, path=path)


def _raw(name: str, raw: bytes, *expected: int, path: str = COMPLETIONS, **headers: str) -> FuzzRequest:
    """`headers`: names with hyphens, so pass them as `**{...}`."""
    return FuzzRequest(name, path, raw, headers, expected=frozenset(expected))


def _call(method: str, path: str, *expected: int) -> FuzzRequest:
    """Return a request without a body."""
    return FuzzRequest(f"{method} {path}"[:44], path, b"", method=method, expected=frozenset(expected))


def _completion(model: str, /, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "The sun is", "max_tokens": 4, "temperature": 0, **fields}


def _chat(model: str, /, **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def _bodies(model: str) -> Iterator[FuzzRequest]:
    """Fields with a harmful size or value."""
    many = {"prompt": [300] * 900, "n": 32, "temperature": 1}
    completions: Mapping[str, tuple[Mapping[str, object], Collection[int]]] = {
        "logit_bias of 50,000 tokens": ({"logit_bias": {str(n): 1 for n in range(50_000)}}, EITHER),
        "5,000 stop strings": ({"stop": [f"x{n}" for n in range(5000)]}, EITHER),
        "a stop string of 200,000 characters": ({"stop": "x" * 200_000}, EITHER),
        "100,000 stop_token_ids": ({"stop_token_ids": list(range(100_000))}, EITHER),
        "5,000 bad_words": ({"bad_words": [f"w{n}" for n in range(5000)]}, EITHER),
        "bad_words of half a surrogate pair": ({"bad_words": ["\ud800"], "stream": True}, EITHER),
        "a negative stop_token_id": ({"stop_token_ids": [-1]}, BAD),
        "a logit_bias out of the vocabulary": ({"logit_bias": {"999999": 1}}, BAD),
        "no allowed_token_ids": ({"allowed_token_ids": []}, BAD),
        "allowed_token_ids out of the vocabulary": ({"allowed_token_ids": [10**9]}, BAD),
        "1,000 allowed_token_ids": ({"allowed_token_ids": list(range(1000))}, EITHER),
        "129 prompts": ({"prompt": ["a"] * 129}, BAD),
        "100 prompts twice": ({"prompt": ["a"] * 100, "n": 2}, BAD),
        **{f"n as {text}": ({"n": text, "temperature": 1}, BAD) for text in ("129", "+129", "1_29", "129.0")},
        "max_tokens as +4": ({"max_tokens": "+4"}, OK),
        "logprobs of a prompt times n": ({**many, "prompt_logprobs": 20}, BAD),
        "an echo with logprobs times n": ({**many, "echo": True, "logprobs": 20}, BAD),
        "max_tokens is 2^40": ({"max_tokens": 2**40}, BAD),
        "prompt_logprobs is 2^30": ({"prompt_logprobs": 2**30}, BAD),
        "prompt_logprobs of the whole vocabulary": ({"prompt_logprobs": -1}, BAD),
        "logprobs is 2^31": ({"logprobs": 2**31}, BAD),
        "a run of one character": ({"prompt": "a" * 300_000}, BAD),
        "invalid token ids": ({"prompt": [10**9, -1]}, BAD),
        "a prompt of lone surrogates": ({"prompt": "\ud800\udc00\udfff" * 10}, EITHER),
        "a cache_salt of 100,000 characters": ({"cache_salt": "x" * 100_000}, BAD),
        "vllm_xargs of 100,000 characters": ({"vllm_xargs": {"a": "x" * 100_000}}, EITHER),
        "kv_transfer_params": ({"kv_transfer_params": {"do_remote_prefill": True}}, BAD),
        "kv_transfer_params in vllm_xargs": ({"vllm_xargs": {"kv_transfer_params": "x"}}, BAD),
        "the highest priority": ({"priority": -(2**63)}, OK),
        "a priority over 64 bits": ({"priority": 2**64}, BAD),
        "NaN": ({"temperature": float("nan")}, BAD),
        "a temperature of 1e308": ({"temperature": 1e308, "logit_bias": {"300": 100}}, EITHER),
        "a top_k over 64 bits": ({"top_k": 2**64}, EITHER),
        "a seed over 64 bits": ({"seed": 2**64}, BAD),
        "a model of 100,000 characters": ({"model": "x" * 100_000}, (404,)),
        "a model of half a surrogate pair": ({"model": "a\udc00b"}, (404,)),
        "prompt_embeds": ({"prompt_embeds": "AAAA"}, BAD),
        "a request_id of 100,000 characters": ({"request_id": "x" * 100_000}, BAD),
        "a request_id of two lines": ({"request_id": "x\n2026-01-31T12:00:00.123 C a b: x"}, BAD),
        "a request_id that steers a terminal": ({"request_id": "\x1b[2J"}, BAD),
        "a session_id of 100,000 characters": ({"session_id": "x" * 100_000}, EITHER),
    }
    for name, (fields, expected) in completions.items():
        yield _json(name, COMPLETIONS, _completion(model, **fields), expected)
    tools = [_tool(f"f{number}") for number in range(128)]
    chats: Mapping[str, tuple[Mapping[str, object], Collection[int]]] = {
        "a chat_template": ({"chat_template": "{{ 7 * 7 }}"}, BAD),
        "a chat_template without end": ({"chat_template": TEMPLATE}, BAD),
        "a chat_template among chat_template_kwargs": ({"chat_template_kwargs": {"chat_template": TEMPLATE}}, BAD),
        "chat_template_kwargs named like arguments": ({"chat_template_kwargs": {"conversation": "x"}}, BAD),
        "messages among chat_template_kwargs": ({"chat_template_kwargs": {"messages": "x"}}, BAD),
        "tensors among chat_template_kwargs": ({"chat_template_kwargs": {"return_tensors": "pt"}}, EITHER),
        "mm_processor_kwargs": ({"mm_processor_kwargs": {"x": 1}}, BAD),
        "media_io_kwargs": ({"media_io_kwargs": {"image": {"x": 1}}}, BAD),
        "an invalid role": ({"messages": [{"role": "\ud800", "content": "hi"}]}, EITHER),
        "10,000 messages": ({"messages": [{"role": "user", "content": "a"}] * 10_000}, LARGE),
        "128 tools that are required": ({"tools": tools, "tool_choice": "required"}, EITHER),
        "a tool whose name is a path": ({"tools": [_tool("../x\0")]}, EITHER),
        "a tool_choice of no tool": ({"tools": tools, "tool_choice": _tool("g")}, BAD),
        "a thinking budget over 64 bits": ({"thinking_token_budget": 2**64}, EITHER),
    }  # fmt: skip
    for name, (fields, expected) in chats.items():
        yield _json(name, CHAT, _chat(model, **fields), expected)
    yield _json("a template to tokenize", TOKENIZE, _chat(model, chat_template=TEMPLATE), BAD)
    batch = _chat(model, messages=[[{"role": "user", "content": "hi"}]] * 200)
    yield _json("a batch of 200", f"{CHAT}/batch", batch, BAD)
    yield _json(
        "a run of new lines to tokenize", TOKENIZE, {"model": model, "prompt": "\n" * 280_000}, (200, 413)
    )
    scored = {"model": model, "query": "a", "items": ["b"] * 20_000, "label_token_ids": [300, 301]}
    yield _json("20,000 items to score", "/generative_scoring", scored, BAD)
    parts = _chat(model, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}])
    yield _json("20,000 parts of a message", MESSAGES, parts, BAD)
    yield _json("tokens over 64 bits to detokenize", "/detokenize", {"model": model, "tokens": [2**64]}, BAD)
    thinking = _chat(model, thinking={"type": "enabled", "budget_tokens": 2**64})
    yield _json("an Anthropic thinking budget over 64 bits", MESSAGES, thinking, EITHER)
    result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": None}]}]
    yield _json("an Anthropic tool result of no tool", MESSAGES, _chat(model, messages=result), EITHER)


def _tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def _grammars(model: str) -> Iterator[FuzzRequest]:
    """Grammars whose compilation explodes or never ends, in frontends (which check them) or in engines."""
    deep: dict[str, object] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    doubling: dict[str, object] = {"a25": {"type": "string"}}
    for level in range(25):
        inner = {"$ref": f"#/$defs/a{level + 1}"}
        doubling[f"a{level}"] = {
            "type": "object",
            "properties": {"x": inner, "y": inner},
            "required": ["x", "y"],
        }
    either = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(4)]
    mutual = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    many = {f"p{number}": {"type": "string"} for number in range(2000)}
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}
    schemas: Mapping[str, tuple[object, Collection[int]]] = {
        "a deep schema": (deep, BAD),
        "a schema that refers to itself": ({"$ref": "#"}, EITHER),
        "two schemas that refer to each other": ({"$defs": mutual, "$ref": "#/$defs/a"}, EITHER),
        "a tree": (tree, OK),
        "an object that must hold itself": ({**tree, "required": ["l"]}, EITHER),
        "a schema on the network": ({"$ref": NOWHERE}, EITHER),
        "a schema of 2^25 parts": ({"$defs": doubling, "$ref": "#/$defs/a0"}, EITHER),
        "a schema of 4^12 cases": ({"allOf": [{"anyOf": either}] * 12}, EITHER),
        "a schema of 2,000 properties": ({"type": "object", "properties": many}, EITHER),
        "10,000 values": ({"enum": [f"v{n}" for n in range(10_000)]}, EITHER),
        "100,000 items at least": ({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}, EITHER),
        "a pattern of 10^6 characters": ({"type": "string", "pattern": "^(a{1000}){1000}$"}, EITHER),
        "a pattern that backtracks": ({"type": "object", "patternProperties": {"^(a|a)*$": {}}}, EITHER),
        "an invalid pattern": ({"type": "object", "patternProperties": {"([": {}}}, EITHER),
        "a multiple of 1e-300": ({"type": "number", "multipleOf": 1e-300}, EITHER),
        "a maximum that crashes llguidance": ({"type": "integer", "maximum": -(2**63) + 1}, EITHER),
        "an enum over 64 bits": ({"enum": [2**70]}, EITHER),
    }  # fmt: skip
    for name, (schema, expected) in schemas.items():
        yield _structured(model, name, expected, json=schema)
    regexes = {
        "backtracking": "(a+)+$",
        "many repetitions": "a{99999}",
        "six levels of repetitions": "((((((a{50}){50}){50}){50}){50}){50})",
        "a look ahead": "(?=a)b",
        "a reference back": "(?P<x>a)(?P=x)",
        "30,000 parentheses": "(" * 30_000 + "a" + ")" * 30_000,
        "5,000 alternatives": "|".join(f"a{n}" for n in range(5000)),
        "nothing": "",
    }
    for name, regex in regexes.items():
        yield _structured(model, f"a regex: {name}", EITHER, regex=regex)
    grammars = {
        "left recursion": 'root ::= root root | "a"',
        "no finite text": 'root ::= root "a"',
        "2^30 letters": "root ::= " + "".join(f"a{n} a{n}\na{n} ::= " for n in range(30)) + '"x"',
        "10^5 repetitions": 'root ::= "a"{100000}',
        "20,000 parentheses": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "Lark's, a regex with a tail": "start: a+\na: /(a|b)*c{1000}/",
        "a rule that is not there": "root ::= nothing",
        "NUL": "\0",
    }
    for name, grammar in grammars.items():
        yield _structured(model, f"a grammar: {name}", EITHER, grammar=grammar)
    yield _structured(model, "10,000 choices", EITHER, choice=[f"c{n}" for n in range(10_000)])
    yield _structured(model, "a choice of 50,000 characters", EITHER, choice=["x" * 50_000])
    yield _structured(model, "two kinds of structured outputs", BAD, regex="a", choice=["a"])
    yield _structured(model, "an unknown backend", EITHER, regex="a", _backend="../x")
    tag = {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2000}}
    yield _structured(model, "a structural tag of 2,000 parts", EITHER, structural_tag=json.dumps(tag))
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    yield _json(
        "a response_format without finite text", CHAT, _chat(model, response_format=response_format), EITHER
    )


def _structured(model: str, name: str, expected: Collection[int], **fields: object) -> FuzzRequest:
    return _json(name, COMPLETIONS, _completion(model, structured_outputs=fields), expected)


def _fetching(model: str) -> Iterator[FuzzRequest]:
    """Requests that would make the server read a file or call another host."""
    metadata = "http://169.254.169.254/latest/meta-data"
    for url in (NOWHERE, metadata, "file:///etc/passwd", "ftp://x/y", "data:,"):
        for kind in ("image_url", "audio_url", "video_url"):
            messages = [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]
            yield _json(f"{kind} {url}", CHAT, _chat(model, messages=messages), BAD)
    image = {"type": "image", "source": {"type": "url", "url": NOWHERE}}
    messages = [{"role": "user", "content": [image]}]
    yield _json("an Anthropic image", MESSAGES, _chat(model, messages=messages), BAD)
    for part in (
        {"type": "input_image", "image_url": NOWHERE},
        {"type": "input_file", "file_url": NOWHERE},
        {"type": "input_file", "file_id": "../../etc/passwd"},
    ):
        content = [{"role": "user", "content": [part]}]
        yield _json(f"responses: {json.dumps(part)}", RESPONSES, {"model": model, "input": content}, BAD)
    for tool in (
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "x", "server_url": NOWHERE, "require_approval": "never"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "local_shell"},
        {"type": "image_generation"},
    ):
        body = {"model": model, "input": "hi", "max_output_tokens": 4, "tools": [tool]}
        yield _json(f"the built-in tool {tool['type']}", RESPONSES, body, EITHER)
    previous = {"model": model, "input": "hi", "previous_response_id": "../../x"}
    yield _json("a previous response that is a path", RESPONSES, previous, (400, 404))


def _headers(model: str) -> Iterator[FuzzRequest]:
    raw = json.dumps(_completion(model)).encode()
    for value in ("nan", "inf", "-1", "0", "1e400", "abc", "10s", "9" * 5000, "5,5", ""):
        name = f"x-request-timeout: {value[:10]}"
        yield _raw(name, raw, *BAD, *(() if value else OK), **{"x-request-timeout": value})
    yield _raw("a deadline of 1 ns", raw, 429, 504, **{"x-request-timeout": "1e-9"})
    for value in ("a" * 129, "a b", "../..", "cmpl-", "%0d%0a", "\xff"):
        yield _raw(f"x-request-id: {value[:10]}", raw, *OK, **{"x-request-id": value})
    for value in ("7", "-1", "abc", "9" * 5000):
        yield _raw(f"a rank: {value[:10]}", raw, *EITHER, **{"x-data-parallel-rank": value})
    for name, value in {
        "authorization": "Bearer " + "x" * 5000,
        "traceparent": "00-" + "f" * 500,
        "accept": "\xff\xfe",
        "expect": "100-continue",
        "x-session-id": "\xff" * 1000,
    }.items():
        yield _raw(f"the header {name}", raw, 100, 200, 401, **{name: value})


def _spellings(model: str) -> Iterator[FuzzRequest]:
    """One body, spelled in ways that a server may misread."""
    text = json.dumps(_completion(model))
    bad = {
        "Latin-1": text.replace("The", "Th\xe9").encode("latin-1"),
        "half a body": text.encode()[: len(text) // 2],
        "100,000 brackets": b"[" * 100_000,
        "100,000 brackets in a field": f'{text[:-1]}, "metadata": {"[" * 100_000}{"]" * 100_000}}}'.encode(),
        "a number of 5,000 digits": f'{text[:-1]}, "temperature": {"9" * 5000}}}'.encode(),
        "JSON in JSON": json.dumps(text).encode(),
        "two bodies": text.encode() * 2,
    }
    for name, raw in bad.items():
        yield _raw(name, raw, *BAD)
    smuggled = json.dumps(_completion(model, kv_transfer_params={"do_remote_prefill": True}))
    for coding in ("utf-16", "utf-32", "utf-8-sig"):
        yield _raw(coding, text.encode(coding), *EITHER)
        yield _raw(f"smuggled in {coding}", smuggled.encode(coding), *BAD)
    not_standard = f'{smuggled[:-1]}, "seed": NaN, "user": "\\ud800"}}'.encode()
    yield _raw("smuggled in non-standard JSON", not_standard, *BAD)
    yield _raw("a field twice", f'{text[:-1]}, "n": 129, "n": 1}}'.encode(), *OK)
    hidden = f'{text[:-1]}, "kv_transfer_params": {{"do_remote_prefill": true}}, "kv_transfer_params": null}}'
    yield _raw("a forbidden field, then null", hidden.encode(), *EITHER)
    bomb = gzip.compress(b" " * (50 << 20))
    codings = {"gzip": bomb, "deflate": bomb, "br": text.encode(), "x" * 1000: text.encode()}
    for coding, raw in codings.items():
        yield _raw(f"coded as {coding[:10]}", raw, 200, 400, 415, **{"content-encoding": coding})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "x" * 1000):
        yield _raw(f"as {kind[:20]}", text.encode(), 400, 415, **{"content-type": kind})
    wrong = {"content-type": "application/json; charset=utf-16"}
    yield _raw("a wrong charset", text.encode(), *EITHER, **wrong)
    yield _raw("9 MiB", f'{text[:-1]}, "user": "{"x" * (9 << 20)}"}}'.encode(), 413)


def _routes(model: str) -> Iterator[FuzzRequest]:
    for path in ("/", "//v1/completions", "/v1/../v1/completions", "/v1/completions%00", "/%ff"):
        yield _call("GET", path, 404, 405)
    for path in (
        "/pause",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/sleep",
        "/init_weights_update_group",
    ):
        yield _raw(f"POST {path}", b"{}", 404, path=path)
    for name in (
        "%2e%2e%2f",
        "%00",
        "x" * 5000,
        "x?stream=x&starting_after=y",
        "x?stream=true&starting_after=-5",
    ):
        yield _call("GET", f"{RESPONSES}/{name}", 400, 404)
    yield _call("POST", f"{RESPONSES}/resp_x/cancel", 400, 404)
    yield _call("GET", "/v1/models/..%2f..%2fetc", 404)
    yield _call("TRACE", COMPLETIONS, 405)
    raw = json.dumps(_completion(model)).encode()
    yield _raw("a query", raw, 200, 400, 404, path=f"{COMPLETIONS}?model=%00%ff&{'x' * 1000}")
