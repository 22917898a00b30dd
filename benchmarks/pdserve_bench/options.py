"""Options that several commands share."""

import argparse
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError

BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="the server: anything that speaks OpenAI's API (default: the running graph, as of `pdserve status`)",
    ),
]
ApiKey = Annotated[str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="sent as Bearer token")]
Ttft = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="SLO: the first token comes within this (default: the file's, else 500ms)"
    ),
]
Gap = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="and no two tokens are further apart (default: the file's, else 60ms)"),
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="write the result there too")]
Plot = Annotated[Path | None, typer.Option(metavar="NAME", help="draw the charts as NAME.png")]


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Parse `1,8,32`, each number once; none of an empty text. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError([f"{option} {text}: give whole numbers from {least} on, as in 512,2048."])
    return list(dict.fromkeys(map(int, words)))


def program(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a program that is run with `python -m`; `doc` is its docstring."""
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    return argparse.ArgumentParser(
        prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
