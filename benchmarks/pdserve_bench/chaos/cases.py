"""What is asked, and what the answer has to be."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from pdserve.config.schema import Config
from pdserve.engine.sim.model import SimModel, sim_model

FIRST_TOKEN, LAST_TOKEN = 300, 999
"""token ids of prompts: ordinary ones in every vocabulary"""
MIN_OUTPUT, MAX_OUTPUT = 24, 96
LONGEST = 1500


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    expected: tuple[int, ...] = ()
    """empty while it is not known"""
    salt: str = ""
    """keeps prompts apart in prefix caches: the same prompt under another salt is computed anew"""


@dataclass(frozen=True)
class Shape:
    """How long prompts are, in tokens: short ones are prefilled locally, long ones remotely."""

    short: tuple[int, int]
    long: tuple[int, int]


def shape(config: Config, max_model_len: int) -> Shape:
    assert config.decode is not None
    threshold = config.decode.max_local_prefill_length
    most = max_model_len - MAX_OUTPUT - 1
    longest = min(max(LONGEST, 2 * threshold), most)
    return Shape((8, min(48, threshold, most)), (min(threshold + 64, longest), longest))


def endless(form: Shape, seed: int) -> Iterator[Case]:
    """Every prompt is another one; two of three are long, three of four streamed."""
    dice = random.Random(seed)
    for number in count():
        low, high = form.short if number % 3 == 0 else form.long
        prompt = tuple(dice.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(dice.randint(low, high)))
        yield Case(
            prompt, dice.randint(MIN_OUTPUT, MAX_OUTPUT), stream=number % 4 != 3, salt=f"{seed}-{number}"
        )


def simulated(config: Config) -> SimModel | None:
    """The model that tells what the workers will say, where all of them are simulations."""
    workers = [one for one in (config.decode, config.prefill) if one is not None]
    if not all(one.engine == "sim" for one in workers):
        return None
    return sim_model(workers[0].engine_args)


def computed(case: Case, model: SimModel) -> tuple[int, ...]:
    context = list(case.prompt)
    for _ in range(case.max_tokens):
        context.append(model.next_token(context))
    return tuple(context[len(case.prompt) :])
