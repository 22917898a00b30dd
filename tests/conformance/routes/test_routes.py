"""The list of routes and methods; pages; headers."""

import json
from typing import Any

import httpx
import pytest

from pdserve.frontend.edge.paths import GENERATING, TOKENIZING
from tests.conformance.answers import Request
from tests.conformance.differences import DIFFERENCES
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT
from tests.real import KEY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

METHODS = ("GET", "HEAD", "POST", "OPTIONS", "DELETE", "PUT", "PATCH")
SERVED = tuple(sorted(GENERATING | TOKENIZING))
BY_ID = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel")
PAGES = ("/health", "/load", "/metrics", "/ping", "/v1/models", "/version")
LEFT_OUT = (
    "/invocations",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/scale_elastic_ep",
    "/v1/systemone",
)
DISABLED = ("/inference/v1/generate", "/v1/chat/completions/render")
"""Two undocumented routes of vLLM, which report that they are disabled."""
NOWHERE = (
    "/",
    "/nowhere",
    "/v1",
    "/v1/embeddings",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "//v1/models",
    "/v1/Models",
    "/v1/chat/completions/x",
    "/v1/files",
    "/v1/responses/x/y",
)


def test_all_routes_of_vllm_are_known(pair: Pair) -> None:
    found = httpx.get(f"{pair.theirs}/openapi.json").json()["paths"]
    assert set(found) == {*SERVED, *BY_ID, *PAGES, *LEFT_OUT}


def route(path: str, method: str, differs: str = "", **more: Any) -> Request:
    path = path.replace("{response_id}", "resp_1")
    return Request(f"{method} {path}", path, method=method, differs=differs, **more)


def wrong_methods(paths: tuple[str, ...], right: tuple[str, ...]) -> list[Request]:
    return [
        route(path, method, "unknown paths and methods")
        for path in paths
        for method in METHODS
        if method not in right and method != "HEAD"
    ]


FOREIGN = "web pages that may not ask"
ORIGIN = {"origin": "http://page.example"}
PREFLIGHT = {
    **ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}
BODY = {"model": "demo", "prompt": SHORT, "max_tokens": 4}


def completion(
    name: str, content: bytes | None = None, path: str = "/v1/completions", **headers: str
) -> Request:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    body = None if content is not None else BODY
    return Request(f"completion with {name}", path, body, content=content, headers=given)


REQUESTS = [
    *wrong_methods(SERVED, ("POST",)),
    *(route(path, "HEAD") for path in SERVED),
    *wrong_methods(("/load", "/v1/models", "/version", "/health"), ("GET",)),
    *wrong_methods(("/ping",), ("GET", "POST")),
    *(route(path, "GET") for path in ("/load", "/docs", "/docs/oauth2-redirect", "/redoc")),
    *(route(path, method, name) for path, name in (("/health", "`/health`, `/ping`"), ("/ping", "`/health`, `/ping`"),
      ("/version", "`/version`")) for method in ("GET",)),
    route("/ping", "POST", "`/health`, `/ping`"),
    route("/v1/models", "GET", "`/v1/models`"),
    route("/openapi.json", "GET", "`/openapi.json`"),
    *(route(path, "HEAD", "HEAD of pages") for path in ("/load", "/v1/models", "/version", "/health", "/ping")),
    *(route("/metrics", method, "`/metrics`") for method in ("GET", "POST", "DELETE")),
    *(route(path, method, "left out") for path in LEFT_OUT for method in METHODS if method != "HEAD"),
    *(route(path, method, "left out") for path in DISABLED for method in ("GET", "POST")),
    *wrong_methods(NOWHERE[:3], ()),
    *(route(path, method, "unknown paths and methods") for path in NOWHERE[3:] for method in ("GET", "POST")),
    route("/v1/models/demo", "GET", "`/v1/models/{model}`"),
    route("/v1/models/no-such-model", "GET", "`/v1/models/{model}`"),
    route("/requests", "GET", "`/requests`, `/requests/{id}`"),
    route("/v1/responses/resp_1", "GET"),
    route("/v1/responses/nothing", "GET"),
    route("/v1/responses/resp_1/cancel", "POST"),
    *(route(f"/v1/responses/resp_1?{query}", "GET")
      for query in ("stream=true", "stream=true&starting_after=1", "starting_after=x", "stream=x")),
    *(Request(f"{method} {path}/", f"{path}/", method=method)
      for path in ("/v1/chat/completions", "/v1/models", "/tokenize", "/health") for method in ("GET", "POST")),
    *(Request(f"preflight {path}", path, method="OPTIONS", headers=PREFLIGHT, differs=FOREIGN)
      for path in ("/v1/chat/completions", "/v1/models", "/nowhere")),
    Request("preflight of an odd method", "/v1/completions", method="OPTIONS",
            headers=PREFLIGHT | {"access-control-request-method": "FOO"}, differs=FOREIGN),
    Request("completion from a page", "/v1/completions", BODY, headers=ORIGIN, differs=FOREIGN),
    Request("stream from a page", "/v1/completions", BODY | {"stream": True}, headers=ORIGIN, differs=FOREIGN),
    Request("error from a page", "/v1/completions", {}, headers=ORIGIN, differs=FOREIGN),
    completion("accept", accept="application/xml"),
    completion("gzip accepted", accept_encoding="gzip"),
    completion("a body in gzip", b"\x1f\x8b\x08\x00", content_encoding="gzip"),
    completion("expect", json.dumps(BODY).encode(), expect="100-continue"),
    completion("override", x_http_method_override="DELETE"),
    completion("an upper-case type", json.dumps(BODY).encode(), content_type="APPLICATION/JSON"),
    completion("a vendor's type", json.dumps(BODY).encode(), content_type="application/vnd.api+json"),
    completion("no valid type", json.dumps(BODY).encode(), content_type=";"),
    completion("a long request id", x_request_id="a" * 300),
    completion("a rank", x_data_parallel_rank="0"),
    completion("an odd rank", x_data_parallel_rank="x"),
    completion("a long header", x_long="a" * 20_000),
    completion("a query", path="/v1/completions?api-version=1"),
    completion("an escaped path", path="/v1/%63ompletions"),
    Request("an odd method", "/v1/completions", BODY, method="FOO", differs="invalid HTTP, or an unknown method"),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_routes_differ_only_as_listed(pair: Pair, request_: Request) -> None:
    ours = pair.same(request_)
    if request_.differs == "left out":
        assert ours.status == 404


def test_vllm_refuses_a_wrong_key_as_listed(pair: Pair) -> None:
    """The graph of this test needs no key; tests/frontend tests a graph's responses to wrong keys."""
    answer = httpx.post(f"{pair.theirs}/v1/completions", json=BODY, headers={"authorization": "Bearer no"})
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert KEY not in answer.text
    assert '`{"error": "Unauthorized"}`' in DIFFERENCES["no valid API key"]
