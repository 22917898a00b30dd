"""Read a trace of user requests (prompt lengths, output lengths, shared prefixes) from a JSONL file.

The format is that of the open Mooncake traces (FAST 2025): `{"timestamp": 27482, "input_length": 6955, "output_length":
52, "hash_ids": [46, 47, …]}`. A hash id stands for 512 tokens and all tokens before them, so equal ids are equal
prefixes; without `hash_ids` nothing is shared. Prompts are generated with these lengths and shared prefixes. Requests
are sent at their timestamps (ms), or as Poisson arrivals of any rate. Other fields are ignored.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import structs

from pdserve.util.errors import ConfigError
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.measure.load import arrivals
from pdserve_bench.measure.runs import Arrival, OpenLoop, Workload
from pdserve_bench.measure.samples import percentile

BLOCK = 512
"""Tokens per hash id."""
MARGIN = 32
"""Tokens of the context kept free for the text of a chat template."""


class TraceRequest(msgspec.Struct, frozen=True):
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    timestamp: float | None = None
    hash_ids: list[int] = []
    block: Annotated[int, msgspec.Meta(ge=1)] = BLOCK
    """tokens per hash id"""

    @property
    def blocks(self) -> list[int]:
        """Hash ids whose blocks begin in the prompt; tokens after these blocks are unique."""
        return self.hash_ids[: -(-self.input_length // self.block)]

    def shrunk(self, divisor: int) -> "TraceRequest":
        """Divide the lengths; each is at least 1."""
        return structs.replace(
            self,
            input_length=max(1, self.input_length // divisor),
            output_length=max(1, self.output_length // divisor),
            block=max(1, self.block // divisor),
        )

    def body(self, endpoint: Endpoint, tokens_per_word: float, salt: str, own: str) -> dict[str, Any]:
        """Prompts share prefixes only with prompts of the same salt. `own` seeds the unique part."""
        words: list[str] = []
        ends = [(f"{salt}/{block}", self.block * number) for number, block in enumerate(self.blocks, 1)]
        for key, end in (*ends, (f"{salt}/{own}", self.input_length)):
            count = max(1, int(min(end, self.input_length) / tokens_per_word)) - len(words)
            words += Prompts(tokens_per_word, key).words(max(0, count))
        return endpoint.body(" ".join(words), self.output_length)


_line = msgspec.json.Decoder(TraceRequest)


@dataclass(frozen=True)
class Trace:
    """A `Scalable`: the trace's requests at any rate and length of time."""

    name: str
    requests: tuple[TraceRequest, ...]
    """At least one."""
    rate: float | None
    """Mean requests per second; None without timestamps."""
    left_out: int = 0
    """Requests that cannot be sent: without output, or too long."""
    timeout: float = 120.0
    """Seconds for each request."""
    tokens_per_word: float = 2.0
    """Of the measured model."""

    def within(self, max_model_len: int) -> "Trace":
        """Remove requests that exceed the model's context. Raises ConfigError if none is left."""
        kept = tuple(
            each for each in self.requests if each.input_length + each.output_length + MARGIN <= max_model_len
        )
        if not kept:
            raise ConfigError(
                [f"{self.name}: all its requests are longer than the model's {max_model_len} tokens."]
            )
        return replace(self, requests=kept, left_out=self.left_out + len(self.requests) - len(kept))

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return consecutive requests from an offset that the seed chooses. A short trace is repeated with new
        prompts."""
        return OpenLoop(self._from(rate, seconds, seed), seconds, self.timeout)

    def _from(self, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
        first = random.Random(seed).randrange(len(self.requests))
        for number, due in enumerate(arrivals(rate, seconds, seed), first):
            turn, place = divmod(number, len(self.requests))
            yield due, self._body_of(place, f"{seed}.{turn}")

    def shrunk(self, divisor: int) -> "Trace":
        """Divide the lengths of all prompts, responses and shared prefixes."""
        return replace(self, requests=tuple(each.shrunk(divisor) for each in self.requests))

    def replayed(self, speed: float, seconds: float, seed: int) -> list[Arrival]:
        """Return the requests of the first `seconds` of a replay that is `speed` times as fast as the trace. Another
        seed gives other prompts. Raises ConfigError if a request has no timestamp."""
        times = [each.timestamp for each in self.requests if each.timestamp is not None]
        if len(times) < len(self.requests):
            raise ConfigError([f"{self.name}: a replay needs the timestamp of each request."])
        first = min(times)
        order = sorted(range(len(times)), key=times.__getitem__)
        due = [((times[place] - first) / 1000 / speed, place) for place in order]
        return [(at, self._body_of(place, str(seed))) for at, place in due if at <= seconds]

    def _body_of(self, place: int, salt: str) -> Callable[[Endpoint], Mapping[str, object]]:
        return partial(
            self.requests[place].body,
            tokens_per_word=self.tokens_per_word,
            salt=salt,
            own=f"request {place}",
        )

    @property
    def shared(self) -> float:
        """Share of all prompt tokens that are in a prefix of an earlier request."""
        seen, found = set[int](), 0
        for request in self.requests:
            for number, block in enumerate(request.blocks):
                if block in seen:
                    found += max(0, min(request.block, request.input_length - number * request.block))
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
