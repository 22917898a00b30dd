"""A trace: the times, prompt lengths and answer lengths of requests that users have sent, from a JSONL file.

Lines are those of the open traces of Mooncake (FAST 2025): `{"timestamp": 27482, "input_length": 6955,
"output_length": 52, "hash_ids": [46, 47, …]}`. `timestamp` is in milliseconds; either all lines have one or none has.
Each hash id stands for 512 tokens *and all before them*, so equal ids are equal prefixes; without `hash_ids` nothing is
shared. Prompts are made up with that many tokens and those shared prefixes. Other fields are ignored.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pdserve.errors import ConfigError
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.runs import OpenLoop, Workload
from pdserve_bench.samples import percentile

BLOCK = 512
"""tokens of a hash id"""
PROBLEMS = 10
"""wrong lines that are reported before reading stops"""
MARGIN = 32
"""tokens that a chat template may add to a made-up prompt"""
_POISSON_RATE = 1.0


class TraceLine(msgspec.Struct, frozen=True):
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    timestamp: float | None = None
    hash_ids: list[int] = []


_line = msgspec.json.Decoder(TraceLine)


@dataclass(frozen=True)
class TraceRequest:
    due: float
    """seconds after the first request of the trace"""
    prompt_tokens: int
    answer: int
    """tokens"""
    blocks: tuple[int, ...] = ()
    """hash ids, of 512 tokens each; the rest of the prompt is its own"""
    line: int = 0
    """of the file"""

    def body(self, endpoint: Endpoint, tokens_per_word: float, salt: str) -> dict[str, Any]:
        """Other salts make other prompts, which share prefixes with each other and with none of another salt."""
        return endpoint.body(self._made_up(tokens_per_word, salt), self.answer)

    def _made_up(self, tokens_per_word: float, salt: str) -> str:
        words: list[str] = []
        ends = [(f"{salt}/{block}", BLOCK * number) for number, block in enumerate(self.blocks, 1)]
        for key, end in (*ends, (f"{salt}/line {self.line}", self.prompt_tokens)):
            count = max(1, int(min(end, self.prompt_tokens) / tokens_per_word)) - len(words)
            words += Prompts(tokens_per_word, key).words(max(0, count))
        return " ".join(words)


@dataclass(frozen=True)
class Trace:
    """Scalable: the requests of the trace at another rate, for as long as is asked for."""

    name: str
    requests: tuple[TraceRequest, ...]
    """in the order of their arrival, at least one"""
    timed: bool
    """else arrivals are Poisson"""
    left_out: dict[str, int] = field(default_factory=dict)
    """why -> how many requests"""
    timeout: float = 120.0
    """seconds, of each request"""
    tokens_per_word: float = 2.0
    """of the model that is measured"""

    @property
    def span(self) -> float:
        """Seconds until it would begin again: from the first request to the last, and a mean gap."""
        count = len(self.requests)
        return self.requests[-1].due * count / (count - 1) if count > 1 else 0.0

    @property
    def rate(self) -> float:
        """Requests per second; 1 where the trace has no times."""
        return len(self.requests) / self.span if self.timed else _POISSON_RATE

    def within(self, max_model_len: int) -> "Trace":
        """Leave out the requests that such a model would refuse; `describe` tells how many. Raises ConfigError where
        none is left."""
        fits = tuple(each for each in self.requests if _longest(each) <= max_model_len)
        if not fits:
            raise ConfigError(
                [f"{self.name}: all its requests are longer than the model's {max_model_len} tokens."]
            )
        start = fits[0].due
        kept = tuple(replace(each, due=each.due - start) for each in fits)
        reason = f"longer than the model's {max_model_len:,} tokens"
        gone = {reason: len(self.requests) - len(kept)} if len(kept) < len(self.requests) else {}
        timed = self.timed and kept[-1].due > 0
        return replace(self, requests=kept, timed=timed, left_out={**self.left_out, **gone})

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """So many consecutive requests of the trace as make that rate, from one that the seed chooses, their arrival
        times stretched to `seconds`: bursts stay. Where the trace is too short it begins again, with fresh prompts."""
        count, dice = max(1, round(rate * seconds)), random.Random(seed)
        start = dice.randrange(len(self.requests))
        picked = [self.requests[(start + number) % len(self.requests)] for number in range(count)]
        salts = [f"{seed}.{(start + number) // len(self.requests)}" for number in range(count)]
        if self.timed:
            turns = [self._due(start + number) for number in range(count + 1)]
            scale = seconds / (turns[-1] - turns[0]) if turns[-1] > turns[0] else 0.0
            dues = [(due - turns[0]) * scale for due in turns[:-1]]
        else:
            dues = sorted(dice.uniform(0, seconds) for _ in range(count))  # Poisson, given their number
        bodies = [
            partial(request.body, tokens_per_word=self.tokens_per_word, salt=salt)
            for request, salt in zip(picked, salts, strict=True)
        ]
        return OpenLoop(list(zip(dues, bodies, strict=True)), seconds, self.timeout)

    def _due(self, number: int) -> float:
        turn, place = divmod(number, len(self.requests))
        return turn * self.span + self.requests[place].due

    @property
    def shared(self) -> float:
        """The share of all prompt tokens that lie in a prefix of an earlier request."""
        seen, found = set[int](), 0
        for request in self.requests:
            for number, block in enumerate(request.blocks):
                if block in seen:
                    found += max(0, min(BLOCK, request.prompt_tokens - number * BLOCK))
            seen.update(request.blocks)
        return found / sum(request.prompt_tokens for request in self.requests)

    def describe(self) -> str:
        prompts = [request.prompt_tokens for request in self.requests]
        answers = [request.answer for request in self.requests]
        rate = f"{self.rate:.3g} a second" if self.timed else "no times: arrivals are Poisson"
        left_out = "".join(f"; {count:,} left out: {why}" for why, count in self.left_out.items())
        return (
            f"{len(self.requests):,} requests, {rate}; prompts of {_middle(prompts)} tokens (p50, p90), "
            f"answers of {_middle(answers)}; {100 * self.shared:.0f} % of the prompt tokens in shared prefixes"
            f"{left_out}"
        )


def _longest(request: TraceRequest) -> int:
    return request.prompt_tokens + request.answer + MARGIN


def _middle(lengths: list[int]) -> str:
    return f"{percentile(lengths, 0.5):,} and {percentile(lengths, 0.9):,}"


def read_trace(file: Path) -> Trace:
    """Raises ConfigError with file and line."""
    try:
        with file.open("rb") as raw:
            found = _read(file, ((number, line) for number, line in enumerate(raw, 1) if line.strip()))
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror or error}."]) from None
    requests = sorted((request for _, request in found), key=lambda request: request.due)
    empty = sum(request.answer < 1 for request in requests)
    requests = [request for request in requests if request.answer > 0]
    if not requests:
        raise ConfigError([f"{file} has no requests."])
    first = requests[0].due
    requests = _unrounded([replace(request, due=request.due - first) for request in requests])
    timed = requests[-1].due > 0
    return Trace(file.name, tuple(requests), timed, {"with no answer": empty} if empty else {})


def _read(file: Path, lines: Iterable[tuple[int, bytes]]) -> list[tuple[bool, TraceRequest]]:
    found: list[tuple[bool, TraceRequest]] = []
    problems: list[str] = []
    for number, raw in lines:
        try:
            line = _line.decode(raw)
            found.append((line.timestamp is not None, _request(line, number)))
            if found[-1][0] != found[0][0]:
                raise ValueError("timestamp: either all lines have one or none has")
        except (ValueError, UnicodeDecodeError) as error:
            problems.append(f"{file}:{number}: {error}.")
        if len(problems) == PROBLEMS:
            break
    if problems:
        raise ConfigError(problems)
    return found


def _request(line: TraceLine, number: int) -> TraceRequest:
    blocks = tuple(line.hash_ids[: -(-line.input_length // BLOCK)])
    return TraceRequest((line.timestamp or 0.0) / 1000, line.input_length, line.output_length, blocks, number)


def _unrounded(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Undo the recorder's rounding where most requests share their time (Mooncake rounds to 3 s): spread them
    evenly up to the next time, so that each interval keeps its requests without making bursts of them."""
    together = [list(group) for _, group in groupby(requests, key=lambda request: request.due)]
    if len(together) < 2 or len(together) > len(requests) / 2:
        return requests
    lengths = [after[0].due - group[0].due for group, after in pairwise(together)]
    lengths.append(percentile(lengths, 0.5))
    return [
        replace(request, due=request.due + length * number / len(group))
        for group, length in zip(together, lengths, strict=True)
        for number, request in enumerate(group)
    ]
