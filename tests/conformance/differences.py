"""What a client may see differently than from one vLLM server, and why. `docs/api.md` has the same table, which a test
compares; each case that names a difference checks that it is still there."""

from dataclasses import dataclass
from pathlib import Path

API_PAGE = Path(__file__).parents[2] / "docs/api.md"
REFUSED = ("body.error.message", "body.error.param")


@dataclass(frozen=True)
class Difference:
    name: str
    """cases refer to it by this name (`Request.differs`)"""
    vllm: str
    ours: str
    """with the reason"""
    where: tuple[str, ...] = ("status", "headers", "body")
    """parts of the answer that it changes (a message is `body.error.message`); all others are compared"""

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.vllm} | {self.ours} |"


DIFFERENCES: dict[str, Difference] = {
    difference.name: difference
    for difference in (
        # routes
        Difference(
            "left out",
            "`/invocations`, `/v1/systemone`, `/kv_event_sources`, elastic expert parallelism; render, derender and "
            "`/inference/v1` answer 403: switched off",
            "404: they are for SageMaker, for a few architectures, or steer one engine",
        ),
        Difference(
            "unknown paths and methods",
            '`{"detail": "Not Found"}`',
            "the same status and `Allow`; an error in OpenAI's shape that says what is there",
            ("body", "headers.allow"),
        ),
        Difference(
            "HEAD of pages", "405", "as GET, without the body: load balancers ask so", ("status", "headers")
        ),
        Difference("`/v1/models/{model}`", "404", "one model, as OpenAI has it"),
        Difference(
            "`/v1/models`",
            '`"owned_by": "vllm"`, `permission`',
            '`"owned_by": "pdserve"`; OpenAI has withdrawn `permission`. All models of the graph',
            ("body.data",),
        ),
        Difference("`/version`", "vLLM's", "pdserve's, and vLLM's as `vllm`", ("body",)),
        Difference(
            "`/health`, `/ping`",
            "no body",
            "JSON: what is missing, what is degraded",
            ("body", "headers.content-type"),
        ),
        Difference(
            "`/openapi.json`", "all of its routes", "those that a graph answers, and its errors", ("body",)
        ),
        Difference("`/requests`, `/requests/{id}`", "404", "receipts (below)"),
        Difference("`/metrics`", "of one process, by any method", "of all processes of the graph, by GET"),
        Difference(
            "what is no HTTP",
            "400, `Invalid HTTP request received.`",
            "400, an error in OpenAI's shape",
            ("headers.content-type", "body"),
        ),
        # fields
        Difference(
            "`kv_transfer_params`, `ec_transfer_params`, `kv_hints`",
            "taken from any client",
            "400: the graph decides where KV comes from, and some values kill an engine",
        ),
        Difference(
            "`n` x prompts", "at most 16,384", "at most 128 (`max-outputs`), which `param` names too", REFUSED
        ),
        Difference(
            "`items` of `/generative_scoring`",
            "any number",
            "at most 128 (`max-outputs`), else 400: each is an output of its own",
        ),
        Difference(
            "logprobs of the prompt (`prompt_logprobs`, `echo` with `logprobs`)",
            "any number",
            "prompt tokens x (logprobs + 1) x `n` up to 500,000, else 400: they are written at once",
        ),
        Difference(
            "parameters (schemas, stop strings, ...) x `n` x prompts",
            "any size",
            "up to 32 MiB, else 400: each output sends them to a worker",
        ),
        Difference(
            "`request_id`",
            "any text",
            "1 to 128 ASCII letters, digits and `. _ : -`, else 400: it is in every message and log line",
        ),
        Difference(
            "lists and objects of a body",
            "any number",
            "up to 10,000, else 400: each takes up to 0.1 ms to read, while others wait",
            REFUSED,
        ),
        Difference(
            "`service_tier: flex`",
            "ignored",
            "served from capacity that no other request waits for, and paused for others "
            "([0083](decisions/0083-batches.md)); without a promise",
        ),
        Difference("`structured_outputs` that is no object", "500", "400, with the field named"),
        Difference(
            '`background` with `store: "false"`, as text',
            "made, and kept for ever",
            "400, as for `store: false`",
        ),
        Difference('a grammar or schema without finite text (`{"$ref": "#"}`)', "500", "400, after one try"),
        # models
        Difference(
            "pictures of a prompt",
            "at most 999",
            "at most 16 (`limit-mm-per-prompt`), else 400: requests share the encoder's time",
        ),
        Difference(
            "pixels of a picture",
            "at most 178,956,970",
            "at most 33,554,432 (`VLLM_MAX_IMAGE_PIXELS`), else 400: 20 KB may hold what takes 6 s",
        ),
        Difference(
            "`image_url` without a picture in it",
            "fetched from any host; 500 for files, 501 for other `data:`",
            "400, unless `allowed-media-domains` names the host: a frontend may reach hosts that a client must not",
        ),
        Difference(
            "`uuid` of a picture",
            "names it in caches: another picture of that name is taken for it",
            "ignored: two clients may choose the same",
        ),
        Difference(
            "an adapter that does not fit the model",
            "500, in its engine's words",
            "the same, after the worker's name; no worker keeps it",
            ("body.error.message",),
        ),
        # around a request
        Difference(
            "no valid API key",
            '401, `{"error": "Unauthorized"}`; pages outside of `/v1` are open',
            "401, an error in OpenAI's shape; all but `/health` and `/ping` needs one "
            "(`/load`, `/version`, `/metrics`: off this machine)",
        ),
        Difference(
            "web pages that may not ask",
            "requests are answered, and their browser keeps the answer; 400 for a preflight",
            "without keys 403, except pages of this machine: the work would be done all the same",
        ),
        Difference("`system_fingerprint`", "made from its configuration", "made from the frontend's"),
        Difference("errors of `/v1/messages`", "in Anthropic's shape or in OpenAI's", "all in Anthropic's"),
        Difference(
            "a body that cannot be read (gzip)", '`{"detail": ...}`', "the same, as an error of its route"
        ),
        Difference(
            "response headers",
            "",
            "`x-request-id` always; `server-timing` and `x-pdserve-...` of what is generated (below); no `server`",
        ),
        Difference(
            "a stream's status",
            "sent at once",
            "sent with the first token: an earlier failure has its own status, not 200 with an error event",
        ),
        Difference(
            "too much load, deadlines, large bodies",
            "queued without a bound",
            "429, 503 and 504 with Retry-After, 408, 413 ([frontend.md](frontend.md#too-much-load))",
        ),
    )
}
