"""Read the installed vLLM's own argument parser and write `pdserve/config/vllm_arguments.json`. Run it when vLLM
is upgraded: `python -m tools.vllm_arguments`."""

import argparse
import enum
import json
from dataclasses import fields
from typing import Any

from pdserve.config.arguments import PATH

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
    """The content of the JSON file, as the installed vLLM would have it. Takes some seconds."""
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
    """The converter inside vLLM's `optional_type` and `parse_type`, which are closures over it."""
    while getattr(kind, "__name__", "") in ("_optional_type", "_parse_type"):
        kind = kind.__closure__[kind.__code__.co_freevars.index("return_type")].cell_contents
    return kind


def _default(value: object) -> object:
    if isinstance(value, enum.Enum):
        value = value.value
    plain = isinstance(value, bool | int | float | str) and value != argparse.SUPPRESS
    return value if plain else None


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each argument, so that a diff reads well."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["arguments"])
    return f'{{\n "vllm": {json.dumps(content["vllm"])},\n "arguments": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    PATH.write_text(as_text(read_parser()), "utf-8")
