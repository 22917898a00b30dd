"""The prompts of a chaos run and their expected outputs.

The outputs of simulated engines are computed. With real engines, the undisturbed graph (or one engine) is asked first.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from typing import Self

from pdserve.config.schema import Config
from pdserve.engine.sim.model import SimModel, sim_model
from pdserve.util.errors import Unavailable
from pdserve_bench.client import Exchange, LoadClient, completion

FIRST_TOKEN, LAST_TOKEN = 300, 999
"""Token ids of prompts: ordinary ones in every vocabulary."""
MIN_OUTPUT, MAX_OUTPUT = 24, 96
LONGEST = 1500
POOL = 30
"""Prompts that a graph with real engines is asked repeatedly."""
NEAR_TIES = 1
"""Tolerated number of prompts whose output depends on the batch in float32; the demo model has none
(docs/decisions/0005-float32-in-identity-tests.md)."""
AT_ONCE = 8
DOCUMENTS = 4
"""Texts with which a third of the prompts begin, so that prompts are sent to workers with their prefix."""


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    expected: tuple[int, ...] = ()
    salt: str = ""
    """The cache salt: the same prompt with another salt has no prefix hit. Equal for prompts with shared documents."""

    def body(self, model: str) -> dict[str, object]:
        """Greedy and with `ignore_eos`, so that there is one right output."""
        return completion(model, self.prompt, self.max_tokens, stream=self.stream, cache_salt=self.salt)


@dataclass(eq=False)
class Attempt(Exchange):
    case: Case = field(kw_only=True)

    @property
    def longest_wait(self) -> float:
        """Longest wait for a token in seconds, including the wait for the first and a wait that still runs."""
        last = [] if self.ended and self.arrivals else [self.ended or time.monotonic()]
        return max(after - before for before, after in pairwise([self.started, *self.arrivals, *last]))

    @classmethod
    def of(cls, case: Case, model: str) -> Self:
        return cls(case.body(model), f"chaos-{uuid.uuid4().hex[:12]}", case=case)


@dataclass(frozen=True)
class PromptLengths:
    """Ranges in tokens: short prompts are prefilled locally, long ones remotely."""

    short: tuple[int, int]
    long: tuple[int, int]


def prompt_lengths(config: Config, max_model_len: int) -> PromptLengths:
    assert config.decode is not None
    threshold = config.decode.max_local_prefill_length
    most = max_model_len - MAX_OUTPUT - 1
    longest = min(max(LONGEST, 2 * threshold), most)
    return PromptLengths((8, min(48, threshold, most)), (min(threshold + 64, longest), longest))


def endless(lengths: PromptLengths, seed: int) -> Iterator[Case]:
    """Yield unique prompts. Of three, one is short, one long, and one long with a document at its start. Three of four
    are streamed."""
    dice = random.Random(seed)

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(dice.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens))

    documents = [text(lengths.long[1] // 2) for _ in range(DOCUMENTS)]
    for number in count():
        prompt = text(dice.randint(*(lengths.short if number % 3 == 0 else lengths.long)))
        salt = f"{seed}-{number}"
        if number % 3 == 2:
            document = dice.choice(documents)
            prompt, salt = document + prompt[: lengths.long[1] - len(document)], f"{seed}-documents"
        yield Case(prompt, dice.randint(MIN_OUTPUT, MAX_OUTPUT), stream=number % 4 != 3, salt=salt)


def simulated(config: Config) -> SimModel | None:
    """Return the model that computes outputs if all engines are simulated, else None."""
    workers = [worker for worker in (config.decode, config.prefill) if worker is not None]
    if not all(worker.engine == "sim" for worker in workers):
        return None
    return sim_model(workers[0].engine_args)


def computed(case: Case, model: SimModel) -> tuple[int, ...]:
    return tuple(model.answer(case.prompt, case.max_tokens))


async def known(
    config: Config, max_model_len: int, seed: int, learned: Callable[[Iterator[Case]], Awaitable[list[Case]]]
) -> Iterator[Case]:
    """Yield cases with expected outputs forever: computed, or from the pool that `learned` returns."""
    cases = endless(prompt_lengths(config, max_model_len), seed)
    if model := simulated(config):
        return (replace(case, expected=computed(case, model)) for case in cases)
    return again(await learned(cases))


async def learn(client: LoadClient, model: str, cases: Iterator[Case], timeout: float) -> list[Case]:
    """Ask an undisturbed graph for the outputs of a pool of cases, each alone and in a batch. A case whose two outputs
    differ is left out. Raises Unavailable if these are more than half of the pool, or if a request fails."""
    pool = list(islice(cases, POOL))
    alone = [await _answer(client, model, replace(case, salt=f"a{case.salt}"), timeout) for case in pool]
    gate = asyncio.Semaphore(AT_ONCE)

    async def beside_others(case: Case) -> tuple[int, ...]:
        async with gate:
            other = replace(case, salt=f"b{case.salt}", stream=not case.stream)
            return await _answer(client, model, other, timeout)

    together = await asyncio.gather(*map(beside_others, pool))
    sure = [
        replace(case, expected=answer)
        for case, answer, other in zip(pool, alone, together, strict=True)
        if answer == other
    ]
    if 2 * len(sure) < len(pool):
        raise Unavailable(
            f"undisturbed, {len(pool) - len(sure)} of {len(pool)} prompts have another output in a batch than "
            "alone, so outputs cannot be compared. Run with --dtype float32."
        )
    return sure


def disagreement(left_out: int, dtype: object) -> str:
    """Return a sentence if too many prompts were left out in float32, else an empty text."""
    if dtype != "float32" or left_out <= NEAR_TIES:
        return ""
    return f"{left_out} of {POOL} prompts have another output in a batch than alone, in float32"


async def answers(
    client: LoadClient, model: str, pool: Sequence[Case], timeout: float
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the current output of each prompt of the pool, under another salt. Raises Unavailable."""
    return {
        case.prompt: await _answer(client, model, replace(case, salt=f"c{case.salt}"), timeout)
        for case in pool
    }


def again(pool: list[Case]) -> Iterator[Case]:
    """Repeat the pool forever, each time under new salts."""
    return (replace(case, salt=f"{case.salt}-{turn}") for turn in count() for case in pool)


async def _answer(client: LoadClient, model: str, case: Case, timeout: float) -> tuple[int, ...]:
    attempt = Attempt.of(case, model)
    await client.ask(attempt, timeout)
    if attempt.error:
        raise Unavailable(f"the undisturbed graph failed a request: {attempt.error}")
    return tuple(attempt.tokens)
