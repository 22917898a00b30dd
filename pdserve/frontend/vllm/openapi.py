"""The API description at `/openapi.json`: vLLM's own, with this graph's routes and errors."""

import re
from collections.abc import Mapping
from typing import Any

import pdserve

LEFT_OUT = re.compile(
    r"/sleep|/wake_up|/is_sleeping|/(start|stop)_profile|/reset_.*|/collective_rpc|/server_info|/pause|/resume"
    r"|/is_paused|/scale_elastic_ep|/is_scaling_elastic_ep|/v1/(load|unload)_lora_adapter|/v1/embeddings|/v1/realtime"
    r"|/pooling|/classify|/score|/v1/score|(/v[12])?/rerank|/inference/v1/.*|.*/(de)?render|/v1/audio/.*"
    r"|/kv_event_sources|/v1/systemone|/invocations|/adapters.*|/init_weight.*|/update_weights"
)
"""vLLM's routes that are not described. They return 404, except those of LoRA adapters if `ADAPTERS` has them. Most
control an engine in the same process."""

_JSON = "application/json"
_REFUSED = "Refused: 400, 401, 404, 405, 408 (a slow body), 413 (a large one), 429 (with Retry-After)"
_FAILED = "Failed: 500, 503 (no worker, with Retry-After), 504 (the request's deadline passed)"
_NO_JSON = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
"""FastAPI's response to a body that cannot be parsed."""


def _page(summary: str, *, path: str = "", query: str = "", kind: str = "string") -> Mapping[str, Any]:
    found = [(name, where) for name, where in ((path, "path"), (query, "query")) if name]
    parameters = [
        {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}
        for name, where in found
    ]
    answer = {"description": "Successful Response", "content": {_JSON: {"schema": {}}}}
    return {"get": {"summary": summary, "parameters": parameters, "responses": {"200": answer}}}


_PAGES = {
    "/v1/models/{name}": _page("Show Available Model", path="name"),
    "/requests": _page("Receipts of the newest requests", query="limit", kind="integer"),
    "/requests/{id}": _page("Receipt of a request: where it went, why, what took how long", path="id"),
}
"""The frontend's own pages."""


def describe(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's description without the routes in `LEFT_OUT`, and with the frontend's own pages and errors."""
    found = {
        path: operations for path, operations in document["paths"].items() if not LEFT_OUT.fullmatch(path)
    }
    paths = {
        path: {method: _with_errors(path, operation) for method, operation in operations.items()}
        for path, operations in {**found, **_PAGES}.items()
    }
    return {**document, "info": {"title": "pdserve", "version": pdserve.__version__}, "paths": paths}


def _with_errors(path: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    names = ["AnthropicErrorResponse"] if path.startswith("/v1/messages") else []
    schemas = [{"$ref": f"#/components/schemas/{name}"} for name in (*names, "ErrorResponse")]
    content = {_JSON: {"schema": {"anyOf": [*schemas, _NO_JSON]}}}
    answers = {
        "200": operation["responses"]["200"],
        "4XX": {"description": _REFUSED, "content": content},
        "5XX": {"description": _FAILED, "content": content},
    }
    if path in ("/health", "/ping"):
        answers["503"] = {"description": "No model can be served: what is missing", "content": {_JSON: {}}}
    if path == "/metrics":
        answers["200"] = {"description": "In Prometheus' format", "content": {"text/plain": {}}}
    return {**operation, "responses": answers}
