"""A trace: the prompt lengths, answer lengths and shared prefixes of requests that users have sent, from a JSONL file.

Lines are those of the open traces of Mooncake (FAST 2025): `{"timestamp": 27482, "input_length": 6955,
"output_length": 52, "hash_ids": [46, 47, …]}`. Each hash id stands for 512 tokens *and all before them*, so equal ids
are equal prefixes; without `hash_ids` nothing is shared. Prompts are made up with that many tokens and those shared
prefixes. `timestamp`, in milliseconds, gives the mean rate; requests arrive at random (Poisson), as in all benchmarks.
Other fields are ignored.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pdserve.util.errors import ConfigError
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.measure.load import arrivals
from pdserve_bench.measure.runs import OpenLoop, Workload
from pdserve_bench.measure.samples import percentile

BLOCK = 512
"""tokens of a hash id"""
MARGIN = 32
"""tokens that a chat template may add to a made-up prompt"""


class TraceRequest(msgspec.Struct, frozen=True):
    """A line of the file."""

    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    timestamp: float | None = None
    hash_ids: list[int] = []

    @property
    def blocks(self) -> list[int]:
        """Those that the prompt has room for; the rest of it is its own."""
        return self.hash_ids[: -(-self.input_length // BLOCK)]

    def body(self, endpoint: Endpoint, tokens_per_word: float, salt: str, own: str) -> dict[str, Any]:
        """Other salts make other prompts, which share prefixes with each other and with none of another salt. `own`
        names what the prompt shares with no other."""
        words: list[str] = []
        ends = [(f"{salt}/{block}", BLOCK * number) for number, block in enumerate(self.blocks, 1)]
        for key, end in (*ends, (f"{salt}/{own}", self.input_length)):
            count = max(1, int(min(end, self.input_length) / tokens_per_word)) - len(words)
            words += Prompts(tokens_per_word, key).words(max(0, count))
        return endpoint.body(" ".join(words), self.output_length)


_line = msgspec.json.Decoder(TraceRequest)


@dataclass(frozen=True)
class Trace:
    """Scalable: the requests of the trace at another rate, for as long as is asked for."""

    name: str
    requests: tuple[TraceRequest, ...]
    """at least one"""
    rate: float | None
    """requests per second on average; None where the lines have no times"""
    left_out: int = 0
    """requests that could not be sent: without an answer, or too long"""
    timeout: float = 120.0
    """seconds, of each request"""
    tokens_per_word: float = 2.0
    """of the model that is measured"""

    def within(self, max_model_len: int) -> "Trace":
        """Leave out the requests that such a model would refuse. Raises ConfigError where none is left."""
        kept = tuple(
            each for each in self.requests if each.input_length + each.output_length + MARGIN <= max_model_len
        )
        if not kept:
            raise ConfigError(
                [f"{self.name}: all its requests are longer than the model's {max_model_len} tokens."]
            )
        return replace(self, requests=kept, left_out=self.left_out + len(self.requests) - len(kept))

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Consecutive requests of the trace, from one that the seed chooses. Where the trace is too short it begins
        again, with fresh prompts."""
        return OpenLoop(self._from(rate, seconds, seed), seconds, self.timeout)

    def _from(
        self, rate: float, seconds: float, seed: int
    ) -> Iterator[tuple[float, Callable[[Endpoint], Mapping[str, object]]]]:
        first = random.Random(seed).randrange(len(self.requests))
        for number, due in enumerate(arrivals(rate, seconds, seed), first):
            turn, place = divmod(number, len(self.requests))
            salt, own = f"{seed}.{turn}", f"request {place}"
            yield (
                due,
                partial(self.requests[place].body, tokens_per_word=self.tokens_per_word, salt=salt, own=own),
            )

    @property
    def shared(self) -> float:
        """The share of all prompt tokens that lie in a prefix of an earlier request."""
        seen, found = set[int](), 0
        for request in self.requests:
            for number, block in enumerate(request.blocks):
                if block in seen:
                    found += max(0, min(BLOCK, request.input_length - number * BLOCK))
            seen.update(request.blocks)
        return found / sum(request.input_length for request in self.requests)

    def describe(self) -> str:
        prompts = [request.input_length for request in self.requests]
        answers = [request.output_length for request in self.requests]
        left_out = f"; {self.left_out:,} left out: without an answer, or too long" if self.left_out else ""
        return (
            f"{len(self.requests):,} requests; prompts of {_middle(prompts)} tokens (p50, p90), answers of "
            f"{_middle(answers)}; {100 * self.shared:.0f} % of the prompt tokens in shared prefixes{left_out}"
        )


def _middle(lengths: list[int]) -> str:
    return f"{percentile(lengths, 0.5):,} and {percentile(lengths, 0.9):,}"


def read_trace(file: Path) -> Trace:
    """Raises ConfigError with file and line."""
    found = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror or error}."]) from None
    for number, line in enumerate(lines, 1):
        try:
            found += [_line.decode(line)] if line.strip() else []
        except ValueError as error:
            raise ConfigError([f"{file}:{number}: {error}."]) from None
    times = [each.timestamp / 1000 for each in found if each.timestamp is not None]
    span = max(times, default=0.0) - min(times, default=0.0)
    kept = tuple(each for each in found if each.output_length)
    if not kept:
        raise ConfigError([f"{file} has no requests."])
    return Trace(file.name, kept, (len(times) - 1) / span if span else None, len(found) - len(kept))
