"""The simplest load: single requests of one shape that arrive at random."""

from dataclasses import dataclass
from typing import Any

from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.load import arrivals
from pdserve_bench.runs import OpenLoop, Workload

PATIENCE = 120.0
"""seconds until a request without an end has failed"""


@dataclass
class PoissonRequests:
    """A `Scalable`: each request has a prompt of `prompt_tokens` that no request had before, and an answer of
    `answer_tokens`; they arrive independently of each other (Poisson)."""

    prompts: Prompts
    """of the model that is measured: `learn_prompts`"""
    prompt_tokens: int = 1300
    answer_tokens: int = 64
    patience: float = PATIENCE

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Other seeds make other arrivals. Prompts are new each time: none is in a prefix cache already."""
        due = ((moment, self._body) for moment in arrivals(rate, seconds, seed))
        return OpenLoop(due, seconds, self.patience)

    def _body(self, endpoint: Endpoint) -> dict[str, Any]:
        return endpoint.body(self.prompts.of(self.prompt_tokens), self.answer_tokens)
