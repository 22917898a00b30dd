"""Do all systems answer the same? The same greedy prompts to each, compared token for token with the baseline's."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.load import side_by_side

_EACH = 6
"""prompts that are asked one at a time, and as many that are asked all at once"""
_PROMPT_TOKENS, _OUTPUT_TOKENS = 150, 24
_TIMEOUT = 60.0


@dataclass
class Sameness:
    """Counts of one contestant's answers; those that failed, or whose baseline's did, are in neither."""

    alone: int = 0
    alone_equal: int = 0
    together: int = 0
    together_equal: int = 0
    failed: int = 0


@dataclass
class Reference:
    """The baseline's answers, each asked alone."""

    prompts: Sequence[str]
    exchanges: list[Exchange]
    """all that are asked for the comparison, of any system"""
    answers: Sequence[Exchange] = ()

    @classmethod
    def of(cls, prompts: Prompts, exchanges: list[Exchange]) -> "Reference":
        return cls([prompts.of(_PROMPT_TOKENS) for _ in range(2 * _EACH)], exchanges)

    async def learn(self, endpoint: Endpoint) -> None:
        self.answers = await self._ask(endpoint, self.prompts, 1)

    async def compare(self, endpoint: Endpoint) -> Sameness:
        alone = await self._ask(endpoint, self.prompts[:_EACH], 1)
        together = await self._ask(endpoint, self.prompts[_EACH:], _EACH)
        return judge(alone, together, self.answers)

    async def _ask(self, endpoint: Endpoint, prompts: Sequence[str], clients: int) -> list[Exchange]:
        bodies = [{**endpoint.body(prompt, _OUTPUT_TOKENS), "return_token_ids": True} for prompt in prompts]
        asked = [Exchange(body) for body in bodies]
        self.exchanges += asked
        await side_by_side(asked, lambda exchange: endpoint.ask(exchange, _TIMEOUT), clients)
        return asked


def judge(alone: Sequence[Exchange], together: Sequence[Exchange], expected: Sequence[Exchange]) -> Sameness:
    """`expected` are the answers to the prompts of both."""
    found = Sameness()
    for number, (ours, theirs) in enumerate(zip([*alone, *together], expected, strict=True)):
        equal = (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        if ours.error or theirs.error:
            found.failed += 1
        elif number < len(alone):
            found.alone += 1
            found.alone_equal += equal
        else:
            found.together += 1
            found.together_equal += equal
    return found
