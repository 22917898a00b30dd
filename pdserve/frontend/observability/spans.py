"""The span of an HTTP request, by OpenTelemetry's conventions for HTTP and for generative AI."""

from starlette.requests import Request

from pdserve.frontend.edge.request_record import RequestRecord
from pdserve.frontend.edge.request_state import CLIENT_LEFT, RequestState
from pdserve.frontend.plugins import Plugin, PluginContext

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class RequestSpans(Plugin):
    def __init__(self, context: PluginContext) -> None:
        self._tracer = context.tracer

    def begin(self, request: Request, state: RequestState) -> None:
        """Start the span; malformed or too long trace headers are ignored."""
        if not self._tracer.on:
            return
        method, path = request.method, state.path
        state.span = self._tracer.request(
            f"{method} {path}",
            state.started,
            {name: request.headers.getlist(name) for name in ("traceparent", "tracestate")},
            {
                "http.request.method": method,
                "http.route": path,
                "url.path": path,
                "url.scheme": request.scope["scheme"],
                "gen_ai.operation.name": _OPERATIONS.get(path, ""),
                "pdserve.request_id": state.request_id,
                "pdserve.key": state.key,
            },
        )

    def end(self, record: RequestRecord) -> None:
        """Add the frontend's hops and end the span; workers export the spans of their hops themselves."""
        if (span := record.span) is None:
            return
        receipt, code = record.receipt, record.code
        span.add_hops((hop for hop in receipt.hops if hop.name in ("admission", "migration")), record.started)
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
        if code >= CLIENT_LEFT:
            attributes["error.type"] = str(code)
        error = (receipt.error or f"HTTP {code}") if code >= 500 else ""
        span.end(record.started + receipt.seconds, attributes, error)
