"""Writes vLLM's arguments, from the installed vLLM's parser, into `pdserve/config/engine_args/vllm_arguments.json`, and
removed arguments into `vllm_removed.json`. Run it when vLLM is upgraded: `python -m tools.vllm_arguments`.

With wheels of older versions (`pip download --no-deps vllm==0.8.5`) it writes the removed arguments from scratch:
`python -m tools.vllm_arguments vllm-*.whl`.
"""

import argparse
import ast
import enum
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdserve.config.engine_args import removed
from pdserve.config.engine_args.arguments import PATH

_KINDS = {
    "int": "int",
    "float": "float",
    "human_readable_int": "human-int",
    "human_readable_int_or_auto": "human-int-or-auto",
    "loads": "json",
    "parse_dataclass": "json",
    "union_dict_and_str": "json-or-str",
}
_LAUNCHER = {"api_server_count", "config", "grpc", "headless"}


def read_parser() -> dict[str, Any]:
    """Return the content of the JSON file for the installed vLLM. Takes some seconds."""
    from vllm import __version__
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, FrontendArgs, make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    names = {
        "tool_call_parser": ToolParserManager.list_registered(),
        "reasoning_parser": ReasoningParserManager.list_registered(),
    }
    api = {field.name for field in fields(BaseFrontendArgs)}
    server = ({field.name for field in fields(FrontendArgs)} | _LAUNCHER) - api
    rows = [
        _row(action, "api" if action.dest in api else "server" if action.dest in server else "engine")
        | ({"names": names[action.dest]} if action.dest in names else {})
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]
    return {"vllm": __version__, "arguments": rows}


def _row(action: argparse.Action, group: str) -> dict[str, Any]:
    options = [option for option in action.option_strings if option.startswith("--")]
    names = [option[2:] for option in options if not option.startswith("--no-")]
    row: dict[str, Any] = {"name": names[0], "kind": _kind(action), "group": group}
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        row["many"] = True
    if action.choices:
        row["choices"] = [choice for choice in action.choices if choice is not None]
    if names[1:]:
        row["aliases"] = names[1:]
    if short := [option for option in action.option_strings if not option.startswith("--")]:
        row["short"] = short
    default = _default(action.default)
    return row if default is None else {**row, "default": default}


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if isinstance(action, argparse._StoreTrueAction):
        return "flag"
    if action.choices:
        return "choice"
    return _KINDS.get(getattr(_unwrapped(action.type), "__name__", ""), "str")


def _unwrapped(kind: Any) -> Any:
    """Return the converter inside vLLM's `optional_type` and `parse_type`, which are closures over it."""
    while getattr(kind, "__name__", "") in ("_optional_type", "_parse_type"):
        kind = kind.__closure__[kind.__code__.co_freevars.index("return_type")].cell_contents
    return kind


def _default(value: object) -> object:
    if isinstance(value, enum.Enum):
        value = value.value
    plain = isinstance(value, bool | int | float | str) and value != argparse.SUPPRESS
    return value if plain else None


def as_text(content: dict[str, Any]) -> str:
    """Format JSON with a line for each argument, so that diffs are short."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["arguments"])
    return f'{{\n "vllm": {json.dumps(content["vllm"])},\n "arguments": [\n{rows}\n ]\n}}\n'


def _names(content: dict[str, Any]) -> set[str]:
    return {name for row in content["arguments"] for name in (row["name"], *row.get("aliases", []))}


def arguments_of(wheel: Path) -> set[str]:
    """Return the arguments' names from a wheel's sources, without importing them, because they need another torch."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.endswith(("/arg_utils.py", "/cli_args.py"))]
        return {name for source in sources for name in _in_source(archive.read(source).decode())}


def _in_source(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            words = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            yield from (word[2:].replace("_", "-") for word in words if word.startswith("--"))
        elif isinstance(node, ast.ClassDef) and node.name in ("FrontendArgs", "BaseFrontendArgs"):
            names = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            yield from (name.id.replace("_", "-") for name in names if isinstance(name, ast.Name))


def removed_since(versions: list[tuple[str, set[str]]]) -> dict[str, str]:
    """Map each removed argument to the first version without it. `versions` begins with the oldest."""
    since: dict[str, str] = {}
    for (_, before), (version, after) in pairwise(versions):
        since |= dict.fromkeys(before - after, ".".join(version.split(".")[:2]))
    return {name: since[name] for name in sorted(since) if name not in versions[-1][1]}


def _by_version(wheel: Path) -> list[int]:
    return [int(part) for part in wheel.name.split("-")[1].split(".") if part.isdecimal()]


def main(wheels: list[Path]) -> None:
    content = read_parser()
    before = json.loads(PATH.read_text("utf-8"))
    installed = (content["vllm"], _names(content))
    if wheels:
        read = [(path.name.split("-")[1], arguments_of(path)) for path in sorted(wheels, key=_by_version)]
        found = removed_since([*read, installed])
    else:
        known = json.loads(removed.PATH.read_text("utf-8"))
        found = known | removed_since([(before["vllm"], _names(before)), installed])
        found = {name: since for name, since in sorted(found.items()) if name not in installed[1]}
    PATH.write_text(as_text(content), "utf-8")
    removed.PATH.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
