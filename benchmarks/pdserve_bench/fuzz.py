"""Bodies of every shape to every route that takes one, and what is left of them in the graph.

    python -m pdserve_bench.fuzz [--requests 10000] [--seed 1] [--only NUMBER] [--real]

Starts a graph of its own with simulated engines (with --real those of configs/local.yaml). A body is a valid one with
some changes: values of other types, integers over 64 bits wherever a number may stand, NaN, lone surrogates, deep
nesting, long strings, half a body, bytes that are no JSON; some clients leave at a random moment. Body NUMBER of a seed
is always the same: `--only NUMBER` sends it alone and shows the answer. Exit code 1 where an answer was a 5xx (but
`ALLOWED`) or none, where `/health` is not ok, where anything is still in flight or a KV block held afterwards, or where
the workers do not run as many requests at once as they did before.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from pdserve.messages import Role
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.chaos.launch import started
from pdserve_bench.chaos.watch import Watch
from pdserve_bench.soak.load import Connection

REAL = Path("configs/local.yaml")
SIM = """
Common: {model: demo, block-size: 32, max-model-len: 1024, num-gpu-blocks-override: 4096}
Frontend: {served_model_name: demo}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 64
  max-num-seqs: 32
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
  additional-config: &speed {sim: {step-seconds: 0.002, prefill-rate: 50000}}
PrefillWorker:
  engine: sim
  common-configs: [model, block-size, max-model-len, num-gpu-blocks-override]
  additional-config: *speed
"""
ALLOWED: Mapping[int, str] = {}
"""5xx statuses that a body may get, each with the reason"""
EXCUSED: Mapping[bytes, str] = {b"list index out of range": "simulated engines have no logprobs"}
"""what an error in a stream may say, each with the reason"""
CONCURRENCY = 32
PATIENCE = 60.0
SETTLE = 15.0
BURST_OUTPUT = 200
"""tokens: long enough that as many as there are places overlap"""

INTEGERS = (2**63 - 1, 2**63, -(2**63) - 1, 2**64 - 1, 2**64, -(2**64), 10**30, -(10**30), 10**400)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**32, 65536, 129, 500)
NAMED = (float("nan"), float("inf"), float("-inf"))
STRINGS = (
    "",
    " ",
    "\0",
    "\ud800",
    "a\udc00b",
    "\U0010ffff",
    "x" * 5000,
    "%s%n",
    "-1",
    "1e999",
    "null",
    "../..",
    "🙂" * 300,
)
HUGE = 200_000
"""characters"""
# fmt: off
NUMERIC = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of", "seed",
    "top_k", "top_p", "min_p", "temperature", "logprobs", "top_logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "priority",
    "truncate_prompt_tokens", "thinking_token_budget", "max_tool_calls",
)
# fmt: on
NESTED: Mapping[str, Callable[[Any], Any]] = {
    "stop_token_ids": lambda value: [value],
    "logit_bias": lambda value: {str(value): 1},
    "logit_bias value": lambda value: {"300": value},
    "allowed_token_ids": lambda value: [300, value],
    "bad_words": lambda value: [str(value)],
    "repetition_detection": lambda value: {"max_pattern_size": value, "min_pattern_size": 1, "min_count": 2},
    "repetition_detection min": lambda value: {
        "max_pattern_size": 4,
        "min_pattern_size": value,
        "min_count": value,
    },
    "structured_outputs": lambda value: {"json": {"enum": [value]}},
    "structured_outputs const": lambda value: {
        "json": {"type": "object", "properties": {"a": {"const": value}}}
    },
    "structured_outputs bounds": lambda value: {
        "json": {"type": "integer", "minimum": value, "maximum": value}
    },
    "structured_outputs length": lambda value: {
        "json": {"type": "string", "maxLength": value, "minLength": value}
    },
    "structured_outputs choice": lambda value: {"choice": [value]},
    "structured_outputs regex": lambda value: {"regex": f"a{{{value}}}"},
    "response_format": lambda value: {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": [value]}},
    },
    "stream_options": lambda value: {"include_usage": value, "continuous_usage_stats": value},
    "vllm_xargs": lambda value: {"x": value},
    "metadata": lambda value: {"x": value},
    "chat_template_kwargs": lambda value: {"x": value},
    "prompt": lambda value: [300, value],
    "tools": lambda value: [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": value}}}}}
    ],
    "stop": lambda value: [value],
    "documents": lambda value: [{"x": value}],
    "priority": lambda value: value,
    "cache_salt": lambda value: value,
    "request_id": lambda value: value,
}
"""where a value may stand inside another one, by field; what follows a space tells several of a field apart"""


@dataclass(frozen=True)
class Body:
    """One request, the same for a number of a seed."""

    number: int
    path: str
    raw: bytes
    leaves: float | None = None
    """seconds after which its client goes away; None: it reads to the end"""

    def __str__(self) -> str:
        text = self.raw if len(self.raw) <= 1500 else self.raw[:700] + b" ... " + self.raw[-700:]
        return f"body {self.number}, POST {self.path}, {len(self.raw)} bytes: {text!r}"


def make(seed: int, number: int, model: str) -> Body:
    dice = random.Random(f"{seed}-{number}")
    path, body = dice.choice(_VALID)(dice, model)
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2, 4))):
        dice.choice((_set_number, _set_nested, _set_nested, _replace, _drop))(dice, body)
    leaves = dice.choice((None, None, None, dice.random() * 0.1, dice.random()))
    return Body(number, path, _spelled(dice, body), leaves)


# valid ones, by route; short, so that thousands end soon


def _prompt(dice: random.Random) -> list[int]:
    return [dice.randint(300, 999) for _ in range(dice.choice((1, 8, 40, 100, 300)))]


def _text(dice: random.Random) -> str:
    return " ".join(
        dice.choice(("the", "sun", "is", "a", "small", "star")) for _ in range(dice.choice((1, 9, 90)))
    )


def _sampling(dice: random.Random, bound: str = "max_tokens") -> dict[str, Any]:
    return {bound: dice.randint(1, 24), "stream": dice.random() < 0.5, "temperature": dice.choice((0, 0.7))}


def _completions(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    prompt = dice.choice((_text(dice), _prompt(dice), [_text(dice)] * 2))
    return "/v1/completions", {"model": model, "prompt": prompt, "ignore_eos": True, **_sampling(dice)}


def _chat(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": _text(dice)}]
    return "/v1/chat/completions", {"model": model, "messages": messages, **_sampling(dice)}


def _batch(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [[{"role": "user", "content": _text(dice)}] for _ in range(2)]
    return "/v1/chat/completions/batch", {"model": model, "messages": messages, "max_tokens": 4}


def _responses(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": model, "input": _text(dice), **_sampling(dice, "max_output_tokens")}


def _anthropic(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    path = dice.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens"))
    return path, {"model": model, "messages": [{"role": "user", "content": _text(dice)}], **_sampling(dice)}


def _tokenizing(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    if dice.random() < 0.5:
        return "/tokenize", {"model": model, "prompt": _text(dice)}
    return "/detokenize", {"model": model, "tokens": _prompt(dice)}


def _scoring(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    return "/generative_scoring", {
        "model": model,
        "query": _text(dice),
        "items": [_text(dice)],
        "label_token_ids": [300, 301],
    }


_VALID = (
    _completions,
    _completions,
    _completions,
    _chat,
    _chat,
    _chat,
    _batch,
    _responses,
    _anthropic,
    _tokenizing,
    _scoring,
)


# changes, in place


def _nasty(dice: random.Random) -> Any:
    kind = dice.randrange(8)
    if kind < 3:
        return dice.choice(INTEGERS)
    if kind == 3:
        return dice.choice(NUMBERS)
    if kind == 4:
        return dice.choice(NAMED)
    if kind == 5:
        return dice.choice(STRINGS)
    return dice.choice(
        (None, True, False, [], {}, [None], {"": None}, [[]], [{}] * 50, {"a": {"b": [1]}}, ["x"] * 3000)
    )


def _set_number(dice: random.Random, body: dict[str, Any]) -> None:
    body[dice.choice(NUMERIC)] = dice.choice((*INTEGERS, *NUMBERS, _nasty(dice)))


def _set_nested(dice: random.Random, body: dict[str, Any]) -> None:
    name = dice.choice(sorted(NESTED))
    body[name.partition(" ")[0]] = NESTED[name](dice.choice((dice.choice(INTEGERS), _nasty(dice))))


def _replace(dice: random.Random, body: dict[str, Any]) -> None:
    """A value somewhere inside."""
    here: Any = body
    while True:
        key = dice.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if not isinstance(here[key], dict | list) or not here[key] or dice.random() < 0.3:
            break
        here = here[key]
    here[key] = _nasty(dice)


def _drop(dice: random.Random, body: dict[str, Any]) -> None:
    body.pop(dice.choice(list(body)), None)
    if not body:
        body["x"] = 1


def _spelled(dice: random.Random, body: dict[str, Any]) -> bytes:
    """As bytes; now and then such as no JSON library would write."""
    sys.set_int_max_str_digits(10_000)
    raw = json.dumps(body, ensure_ascii=True)
    match dice.randrange(40):
        case 0:
            return raw.encode()[: dice.randrange(len(raw))]
        case 1:
            return dice.randbytes(dice.randrange(2000))
        case 2:
            depth = dice.choice((50, 500, 5000, 100_000))
            return f'{raw[:-1]}, "metadata": {"[" * depth}{"]" * depth}}}'.encode()
        case 3:
            return f'{raw[:-1]}, "user": "{"y" * dice.randrange(HUGE)}"}}'.encode()
        case 4:
            return f'{raw[:-1]}, "temperature": {"9" * 5000}}}'.encode()
        case 5:
            return raw.replace('"max', '"n": 3, "max', 1).encode() + b"\x00"
        case 6:
            return json.dumps(json.dumps(body)).encode()
        case 7:
            at = dice.randrange(len(raw))
            return raw[:at].encode() + dice.randbytes(3) + raw[at:].encode()
        case _:
            return raw.encode()


# sending


@dataclass
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Fuzzer:
    def __init__(self, graph: GraphRecord, seed: int) -> None:
        address = urlsplit(graph.url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._graph, self._seed = graph, seed
        self.report = Report()

    async def run(self, numbers: Sequence[int], concurrency: int = CONCURRENCY) -> Report:
        """Send these bodies, and look what they left."""
        began = time.monotonic()
        async with Watch() as watch:
            await watch.move(self._graph)
            places = sum(each.max_num_seqs for each in await watch.learn() if each.role is Role.DECODE)
            rest = iter(numbers)

            async def client() -> None:
                for number in rest:
                    await self.send(make(self._seed, number, self._graph.model))

            await asyncio.gather(*(client() for _ in range(concurrency)))
            await self._look_after(watch, places)
        self.report.seconds = time.monotonic() - began
        return self.report

    async def send(self, body: Body) -> bytes:
        """The answer, as far as it was read."""
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE if body.leaves is None else body.leaves):
                connection = await Connection.open(self._host, self._port, body.raw, path=body.path)
                try:
                    status = await connection.status()
                    answer = await connection.rest()
                finally:
                    connection.leave()
        except TimeoutError:
            if body.leaves is None:
                self._problem(f"no end within {PATIENCE:g} s", body)
            self.report.statuses["left"] += 1
        except (OSError, EOFError, ValueError) as error:
            self._problem(f"no answer: {error!r}", body)
        else:
            self.report.statuses[str(status)] += 1
            if status >= 500 and status not in ALLOWED:
                self._problem(f"status {status}: {answer[-600:]!r}", body)
            elif status == 200 and _error_code(answer) >= 500 and not any(map(answer.__contains__, EXCUSED)):
                self._problem(f"in the stream: {answer[-600:]!r}", body)
        return answer

    def _problem(self, what: str, body: Body) -> None:
        self.report.problems.append(
            f"{what}\n    {body}\n    again: --seed {self._seed} --only {body.number}"
        )

    async def _look_after(self, watch: Watch, places: int) -> None:
        left = await watch.leftovers(SETTLE)
        if left.blocks:
            self.report.problems.append(f"KV blocks are held: {dict(left.blocks)}")
        if left.queued:
            self.report.problems.append(f"{left.queued} prefill requests are still queued")
        for each in await watch.instances():
            if each.load.running or each.load.waiting:
                self.report.problems.append(
                    f"{each.id}: running {each.load.running}, waiting {each.load.waiting}"
                )
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            if (answer := await http.get(f"{self._graph.url}/health")).status_code != 200:
                self.report.problems.append(f"/health: {answer.status_code} {answer.text}")
        await self._burst(places)

    async def _burst(self, places: int) -> None:
        """As many requests as the workers run at once, all of which have to be in the middle at the same moment: a
        place that is taken by nobody makes one of them wait for another's end."""
        firsts, ends = [], []

        async def ask(number: int) -> None:
            body: dict[str, object] = {
                "model": self._graph.model,
                "prompt": [300 + number],
                "max_tokens": BURST_OUTPUT,
                "ignore_eos": True,
                "stream": True,
            }
            connection = await Connection.open(self._host, self._port, body)
            try:
                if (status := await connection.status()) != 200:
                    self.report.problems.append(f"burst: status {status}")
                while not (line := await connection.line()).startswith(b"data: ") and line:
                    pass
                firsts.append(time.monotonic())
                if b"[DONE]" not in await connection.rest():
                    self.report.problems.append("burst: an answer that broke off")
                ends.append(time.monotonic())
            finally:
                connection.leave()

        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*map(ask, range(places)))
        except TimeoutError:
            self.report.problems.append(
                f"burst: {places - len(ends)} of {places} had no end within {PATIENCE:g} s"
            )
        late = sum(first > min(ends, default=0.0) for first in firsts)
        if late:
            self.report.problems.append(f"burst: {late} of {places} requests began when another had ended")


def _error_code(answer: bytes) -> int:
    """Of an error event in a stream; 0 where there is none."""
    for line in answer.splitlines():
        if line.startswith(b"data: {") and b'"error"' in line:
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                return int(json.loads(line[6:])["error"]["code"])
    return 0


async def _main(args: argparse.Namespace, folder: Path) -> Report:
    file = REAL
    if not args.real:
        file = folder / "sim.yaml"
        file.write_text(SIM)
    async with started(file, folder, 1, "", lambda text: print(text, file=sys.stderr)) as found:
        fuzzer = Fuzzer(found.graph, args.seed)
        if args.only is None:
            return await fuzzer.run(range(args.first, args.first + args.requests), args.concurrency)
        body = make(args.seed, args.only, found.graph.model)
        print(body)
        print((await fuzzer.send(body)).decode(errors="replace"))
        return fuzzer.report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first body (0)")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the graph and its logs, to be kept")
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as folder:
        if args.keep:
            args.keep.mkdir(parents=True)
        report = asyncio.run(_main(args, args.keep or Path(folder)))
    print("\n".join(f"{count:6} {status}" for status, count in sorted(report.statuses.items())))
    for problem in report.problems[:40]:
        print(problem)
    told = (
        f"{len(report.problems)} problems" if report.problems else "nothing is left, and every place is free"
    )
    print(f"{sum(report.statuses.values())} bodies in {report.seconds:.0f} s: {told}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
