"""The description of the API that `/openapi.json` serves: vLLM's own, of what a graph answers."""

import re
from collections.abc import Mapping
from typing import Any

import pdserve

LEFT_OUT = re.compile(
    r"/sleep|/wake_up|/is_sleeping|/(start|stop)_profile|/reset_.*|/collective_rpc|/server_info|/pause|/resume"
    r"|/is_paused|/scale_elastic_ep|/is_scaling_elastic_ep|/v1/(load|unload)_lora_adapter|/v1/embeddings|/v1/realtime"
    r"|/pooling|/classify|/score|/v1/score|(/v[12])?/rerank|/inference/v1/.*|.*/(de)?render|/v1/audio/.*"
    r"|/kv_event_sources|/v1/systemone|/invocations|/init_weight.*|/update_weights"
)
"""routes that vLLM has for some models and that make no sense on a separated graph: 404 says so. Most steer an engine
that is not in this process"""

_JSON = "application/json"
_REFUSED = "Refused: 400, 401, 404, 405, 408 (a slow body), 413 (a large one), 429 (with Retry-After)"
_FAILED = "Failed: 500, 503 (no worker, with Retry-After), 504 (the request's deadline passed)"
_NO_JSON = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
"""as FastAPI refuses a body that cannot be parsed"""
_MODEL = {
    "get": {
        "summary": "Show Available Model",
        "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
        "responses": {"200": {"description": "Successful Response", "content": {_JSON: {"schema": {}}}}},
    }
}


def describe(document: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's description without what is left out, with the edge's own page and the errors that the edge may answer."""
    found = {path: operations for path, operations in document["paths"].items() if not _is_left_out(path)}
    paths = {
        path: {method: _with_errors(path, operation) for method, operation in operations.items()}
        for path, operations in {**found, "/v1/models/{name}": _MODEL}.items()
    }
    return {**document, "info": {"title": "pdserve", "version": pdserve.__version__}, "paths": paths}


def _is_left_out(path: str) -> bool:
    return LEFT_OUT.fullmatch(path) is not None


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
