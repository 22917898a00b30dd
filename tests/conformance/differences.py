"""Allowed differences from one vLLM server, with reasons: the table of `docs/api.md`. A request that names a difference
(`Request.differs`) checks that the difference still exists."""

from pathlib import Path

API_PAGE = Path(__file__).parents[2] / "docs/api.md"
_TABLE = API_PAGE.read_text().partition("| what |")[2].partition("\n\n")[0].splitlines()[2:]
DIFFERENCES = {
    name.strip(): theirs.strip() for name, theirs, _ in (row.strip("|").split("|") for row in _TABLE)
}
"""Name -> what vLLM does."""
WHERE: dict[str, tuple[str, ...]] = {
    "unknown paths and methods": ("body", "headers.allow"),
    "HEAD of pages": ("status", "headers"),
    "`/v1/models`": ("body.data",),
    "`/version`": ("body",),
    "`/health`, `/ping`": ("body", "headers.content-type"),
    "`/openapi.json`": ("body",),
    "invalid HTTP, or an unknown method": ("headers.content-type", "body"),
    "`n` x prompts": ("body.error.message", "body.error.param"),
    "lists and objects of a body": ("body.error.message", "body.error.param"),
    "an adapter that does not fit the model": ("body.error.message",),
}
"""Parts of the response that a difference changes; all other parts must be equal. A difference that is not a key here
may change all parts (`EVERYWHERE`)."""
EVERYWHERE = ("status", "headers", "body")
