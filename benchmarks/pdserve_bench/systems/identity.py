"""Do all systems answer the same? The same greedy prompts to each, compared token for token with the baseline's."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.load import side_by_side

ALONE, TOGETHER = 6, 6
"""prompts that are asked one at a time, and those that are asked all at once"""
_PROMPT_TOKENS, _OUTPUT_TOKENS = 150, 24
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Answer:
    tokens: Sequence[int] = ()
    """empty where the server does not tell them"""
    text: str = ""

    def equals(self, other: "Answer") -> bool:
        if self.tokens and other.tokens:
            return list(self.tokens) == list(other.tokens)
        return self.text == other.text


@dataclass
class Sameness:
    """Of one contestant. Counts of answers; those that failed are in neither."""

    alone: int = 0
    alone_equal: int = 0
    together: int = 0
    together_equal: int = 0
    failed: int = 0

    def told(self) -> str:
        told = f"{self.alone_equal}/{self.alone} one at a time, {self.together_equal}/{self.together} at once"
        return told + (f", {self.failed} failed" if self.failed else "")


@dataclass
class Reference:
    """The baseline's answers, each asked alone."""

    prompts: Sequence[str]
    answers: Sequence[Answer | None] = ()
    """None where it failed"""
    exchanges: list[Exchange] = field(default_factory=list)
    """all that were asked for the comparison, of any system"""

    @classmethod
    def of(cls, prompts: Prompts) -> "Reference":
        return cls([prompts.of(_PROMPT_TOKENS) for _ in range(ALONE + TOGETHER)])

    async def learn(self, endpoint: Endpoint) -> None:
        self.answers = await self._ask(endpoint, self.prompts, 1)

    async def compare(self, endpoint: Endpoint) -> Sameness:
        alone = await self._ask(endpoint, self.prompts[:ALONE], 1)
        together = await self._ask(endpoint, self.prompts[ALONE:], TOGETHER)
        return judge(alone, together, self.answers)

    async def _ask(self, endpoint: Endpoint, prompts: Sequence[str], clients: int) -> list[Answer | None]:
        asked = [
            Exchange(endpoint.body(prompt, _OUTPUT_TOKENS) | {"return_token_ids": True}) for prompt in prompts
        ]
        self.exchanges += asked
        await side_by_side(asked, lambda exchange: endpoint.ask(exchange, _TIMEOUT), clients)
        return [None if each.error else Answer(each.tokens, each.text) for each in asked]


def judge(
    alone: Sequence[Answer | None], together: Sequence[Answer | None], expected: Sequence[Answer | None]
) -> Sameness:
    """`expected` are the answers to the prompts of both."""
    found = Sameness()
    for number, (ours, theirs) in enumerate(zip([*alone, *together], expected, strict=True)):
        if ours is None or theirs is None:
            found.failed += 1
            continue
        if number < len(alone):
            found.alone += 1
            found.alone_equal += ours.equals(theirs)
        else:
            found.together += 1
            found.together_equal += ours.equals(theirs)
    return found
