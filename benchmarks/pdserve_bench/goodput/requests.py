"""The simplest load: single requests of one shape that arrive at random."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.load import open_loop
from pdserve_bench.runs import LoadRun, Workload

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
    rate: float = 4.0
    patience: float = PATIENCE

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Other seeds make other arrivals. Prompts are new each time: none is in a prefix cache already."""
        return _Arrivals(self, rate, seconds, seed)


@dataclass
class _Arrivals:
    shape: PoissonRequests
    rate: float
    seconds: float
    seed: int

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        async def send(exchange: Exchange) -> None:
            await endpoint.ask(exchange, self.shape.patience)

        run.began = time.monotonic()
        run.asks_until = run.began + self.seconds
        try:
            await open_loop(self._requests(endpoint, run), send, self.rate, self.seconds, self.seed)
        finally:
            run.ended = time.monotonic()

    def _requests(self, endpoint: Endpoint, run: LoadRun) -> Iterator[Exchange]:
        shape = self.shape
        while True:
            run.exchanges.append(
                Exchange(endpoint.body(shape.prompts.of(shape.prompt_tokens), shape.answer_tokens))
            )
            yield run.exchanges[-1]
