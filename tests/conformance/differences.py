"""What a client may see differently than of one vLLM server, and why. `docs/api.md` has the same table; a test holds
the two together, and each case that names a difference holds that it is still there."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Difference:
    name: str
    """of the cases that show it (`Request.differs`)"""
    vllm: str
    ours: str
    """with the reason"""
    where: tuple[str, ...] = ("status", "headers", "body")
    """parts of the answer that it changes: all others are compared (a message is `body.error.message`)"""

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.vllm} | {self.ours} |"


DIFFERENCES: dict[str, Difference] = {
    difference.name: difference
    for difference in (
        Difference(
            "`kv_transfer_params`, `ec_transfer_params`, `kv_hints`",
            "taken from any client",
            "400: where KV comes from is decided inside the graph, and some values end an engine",
        ),
        Difference(
            "`structured_outputs` that is no object",
            "500",
            "400, with the field named",
        ),
    )
}
API_PAGE = Path(__file__).parents[2] / "docs/api.md"
