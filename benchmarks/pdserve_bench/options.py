"""Command-line options that several commands share."""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pdserve.util.errors import ConfigError, PdserveError

N = TypeVar("N", int, float)

BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="the server: anything that speaks OpenAI's API (default: the running graph, see `pdserve status`)",
    ),
]
Model = Annotated[str, typer.Option(metavar="NAME", help="model (default: the server's first)")]
ApiKey = Annotated[
    str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="API key, sent as Bearer token")
]
Ttft = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="SLO: bound of the time to first token (default: the file's, else 500ms)"
    ),
]
Gap = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="SLO: longest gap between tokens (default: the file's, else 60ms)"),
]
Share = Annotated[
    float, typer.Option(metavar="S", min=0.01, max=1.0, help="share of the requests that must keep the SLO")
]
PromptTokens = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="tokens per prompt; all prompts differ (ignored with a trace)"),
]
AnswerLen = Annotated[int, typer.Option(metavar="N", min=2, help="tokens per response")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="seed of prompts and arrivals (default: random)")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="also write the result as JSON")]


def seed_of(seed: int | None) -> int:
    return random.SystemRandom().randrange(1 << 31) if seed is None else seed


def numbers(text: str, kind: Callable[[str], N]) -> list[N]:
    """Parse `1,8,32`; empty if a word is no number."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        return []


def rates_of(option: str, text: str) -> list[float]:
    """Parse `4,6,8`, requests per second, and sort them. Raises ConfigError."""
    rates = sorted(set(numbers(text, float)))
    if not rates or not 0 < rates[0] <= rates[-1] < 1000:
        raise ConfigError([f"{option} {text}: give numbers above 0 and below 1000, as 4,6,8."])
    return rates


def counts_of(option: str, text: str) -> list[int]:
    """Parse `1,8,32`. Raises ConfigError."""
    counts = numbers(text, int)
    if not counts or not 0 < min(counts) <= max(counts) <= 1000:
        raise ConfigError([f"{option} {text}: give whole numbers from 1 to 1000, as in 1,8,32."])
    return counts


def program(doc: str | None) -> argparse.ArgumentParser:
    """Return an argument parser for `python -m` programs; `doc` is the module's docstring."""
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    return argparse.ArgumentParser(
        prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def exit_code(main: Callable[[], int]) -> int:
    """Run a `python -m` program and return its exit code. If it raises a PdserveError, print that and return 2 or 1, as
    `pdserve` does."""
    try:
        return main()
    except PdserveError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
