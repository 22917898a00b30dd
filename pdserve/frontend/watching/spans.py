"""The span of an HTTP request, by OpenTelemetry's conventions for HTTP and for generative AI."""

from starlette.requests import Request

from pdserve.frontend.edge.trace import CLIENT_LEFT, RequestFailure, RequestTrace
from pdserve.observe.tracing import TracedSpan, Tracer
from pdserve.watch import Receipt

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


def begin_span(tracer: Tracer, request: Request, trace: RequestTrace) -> TracedSpan | None:
    """Return None where the request is not traced. Malformed or too long headers are ignored."""
    if not tracer.on:
        return None
    method, path = request.method, trace.path
    return tracer.request(
        f"{method} {path}",
        trace.started,
        {name: request.headers.getlist(name) for name in ("traceparent", "tracestate")},
        {
            "http.request.method": method,
            "http.route": path,
            "url.path": path,
            "url.scheme": request.scope["scheme"],
            "gen_ai.operation.name": _OPERATIONS.get(path, ""),
            "pdserve.request_id": trace.request_id,
            "pdserve.key": trace.key,
        },
    )


def end_span(span: TracedSpan, receipt: Receipt, failure: RequestFailure | None, started: float) -> None:
    """`started`: monotonic, the zero of the receipt's hops. Workers export the spans of their hops themselves."""
    span.add_hops((hop for hop in receipt.hops if hop.name in ("admission", "migration")), started)
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.model": receipt.model,
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.output_tokens,
        "pdserve.cached_tokens": receipt.cached_tokens,
        "pdserve.prefill": receipt.prefill,
    }
    if receipt.ttft is not None:
        attributes["pdserve.ttft"] = receipt.ttft
    if receipt.status != CLIENT_LEFT:
        attributes["http.response.status_code"] = receipt.status
    code = failure.status if failure is not None else receipt.status
    if code >= CLIENT_LEFT:
        attributes["error.type"] = str(code)
    error = (receipt.error or f"HTTP {code}") if code >= 500 else ""
    span.end(started + receipt.seconds, attributes, error)
