"""vLLM's own argument list, without importing vLLM (which takes seconds): names, kinds and choices from the JSON file
beside this module. `python -m tools.vllm_arguments` writes it, and a test asserts that it equals the installed vLLM's.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.contract.records import Role

T = TypeVar("T")
N = TypeVar("N", int, float)

PATH = Path(__file__).with_name("vllm_arguments.json")
KV_ROLES = {Role.DECODE: "kv_consumer", Role.PREFILL: "kv_producer", Role.BOTH: "kv_consumer"}
"""what vLLM's `kv-transfer-config` calls them. With NIXL any of them hands out KV, and `kv_both` is deprecated"""


class Argument(msgspec.Struct, frozen=True):
    name: str
    """kebab-case, without dashes in front"""
    kind: str
    """flag (no --no- form), bool, int, human-int (also 16k), human-int-or-auto, float, str, json, json-or-str or
    choice"""
    group: str
    """`engine`, `api` (templates, parsers and answers of the OpenAI API) or `server` (vLLM's own HTTP server)"""
    many: bool = False
    """whether it takes a list of values"""
    choices: tuple[str | int, ...] = ()
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    """as `-tp`, for command lines only"""
    default: object = None
    """None also if the default is an object"""
    names: tuple[str, ...] = ()
    """of vLLM's own parsers; a plugin may add others"""


class _ArgumentFile(msgspec.Struct):
    arguments: list[Argument]


_AT_LEAST_ONE = {
    "block-size",
    "kv-cache-memory-bytes",
    "max-cpu-loras",
    "max-loras",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "nnodes",
    "num-gpu-blocks-override",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "tensor-parallel-size",
}
"""counts that vLLM's parser lets through and its engine refuses a minute later"""
_SHARES = {"gpu-memory-utilization"}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_REFUSED = {
    "config": "would read a second file of arguments; write them here instead.",
    "host": "belongs in Frontend (where clients connect) or in Graph (where the other workers connect).",
    "port": "belongs in Frontend; workers choose their own ports.",
    "api-server-count": "is Frontend.ServiceArgs.workers in pdserve; remove it.",
    "served-model-name": "belongs in Frontend, because every worker of a graph serves the same name.",
    "kv-events-config": "is set by pdserve, which finds prefix hits by it; remove it.",
    "kv-offloading-size": "is kv-offload in pdserve, as in kv-offload: 32GiB; set that.",
    "kv-offloading-backend": "is kv-offload in pdserve, as in kv-offload: 32GiB; set that.",
    "ec-transfer-config": "is a split that this graph does not have; remove it.",
    "disable-log-stats": "would blind what routing and `pdserve status` read; remove it.",
    "otlp-traces-endpoint": "is Graph.otlp-endpoint in pdserve, which traces the whole graph; set it there.",
    "collect-detailed-traces": "needs vLLM's own traces; pdserve's are set by Graph.otlp-endpoint; remove it.",
    "device-ids": "is decided by the placement; use ServiceArgs.resources.gpu or .gpu-ids.",
    "node-rank": "differs by host: start `pdserve decode` or `pdserve prefill` with --node-rank there; remove it.",
    "master-addr": "is found through etcd by the hosts of a worker (nnodes); remove it.",
    "master-port": "is found through etcd by the hosts of a worker (nnodes); remove it.",
    "worker-extension-cls": "is pdserve's own, which asks for AMX in each worker before its first pass; remove it.",
    "runner": "is always generate in this graph; remove it.",
    "convert": "would make an embedding model, which has nothing to decode; remove it.",
    "skip-tokenizer-init": "would leave the frontends without a tokenizer; remove it.",
    "enable-elastic-ep": "changes the ranks while running, which KV transfer cannot follow; remove it.",
}
"""vLLM arguments that a file may not set, and the reason as the end of a sentence that begins with the key"""


SAMPLING_ARGUMENTS = {
    "enable-return-routed-experts",
    "logits-processors",
    "logprobs-mode",
    "return-sampling-mask",
    "watermark",
    "watermark-config",
}
"""engine arguments with which an engine may sample other tokens than another engine, or other logprobs of them"""
SPECULATION_ARGUMENTS = {
    "speculative-config": "",
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
"""engine arguments of speculative decoding -> the key of the first one that they set"""
_LOOKED_UP = {"ngram", "[ngram]", "ngram_gpu", "suffix"}
"""methods that look drafts up in the tokens so far"""
RESPONSE_ARGUMENTS = SAMPLING_ARGUMENTS | {
    "max-logprobs",
    "reasoning-config",
    "reasoning-parser",
    "reasoning-parser-plugin",
    "structured-outputs-config",
}
"""engine arguments on which it depends what a request may ask for, and what it is answered"""


@cache
def arguments() -> Mapping[str, Argument]:
    file = msgspec.json.decode(PATH.read_bytes(), type=_ArgumentFile)
    return {argument.name: argument for argument in file.arguments}


@cache
def canonical(name: str) -> str | None:
    """vLLM's first name for an argument or one of its aliases; None if vLLM has no such argument."""
    if name in arguments():
        return name
    return next((known.name for known in arguments().values() if name in known.aliases), None)


def parse(name: str, value: object) -> object:
    """The value as vLLM will parse it: 16k as a number, JSON text as a mapping. `name` is canonical. Raises ValueError
    with what it must be, as the end of a sentence that begins with the key."""
    argument = arguments()[name]
    if value is None:
        raise ValueError("has no value: give it one or remove the line.")
    if not argument.many:
        return _parse_one(argument, value)
    values = value if isinstance(value, list) else [value]
    return [_parse_one(argument, item) for item in values]


def refusal(name: str) -> str | None:
    """Why the argument cannot be set in a worker, as the end of a sentence that begins with its key; None if it can.
    pdserve refuses it rather than change it silently."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name.startswith("data-parallel-"):
        return "is ServiceArgs.workers in pdserve: each worker is an engine of its own; remove it."
    if arguments()[name].group == "server":
        return "is about vLLM's own HTTP server, which a worker does not have; remove it."
    return None


def shapes_response(name: str) -> bool:
    """Whether frontends need the argument too (the worker's model card brings it there). Decode engines need the
    reasoning arguments as well: a grammar applies only after the reasoning."""
    return arguments()[name].group == "api" or name.startswith("reasoning-")


def for_engine(args: Mapping[str, object]) -> dict[str, object]:
    """The arguments that vLLM's engine parser takes: without those of the API (templates, parsers)."""
    return {name: value for name, value in args.items() if arguments()[name].group != "api"}


def speculation(args: Mapping[str, object]) -> dict[str, object]:
    """vLLM's speculative-config, with what the other arguments of speculative decoding set; empty: there is none."""
    given = args.get("speculative-config")
    found = dict(given) if isinstance(given, dict) else {}
    return found | {key: args[name] for name, key in SPECULATION_ARGUMENTS.items() if key and name in args}


def draft_model(args: Mapping[str, object]) -> dict[str, object] | None:
    """The speculative decoding whose drafts come from layers of their own (a draft model, EAGLE, MTP), with weights and
    KV; None if there is none."""
    found = speculation(args)
    looked_up = str(found.get("method", found.get("model"))) in _LOOKED_UP
    return None if looked_up or not found else found


def to_argv(args: Mapping[str, object]) -> list[str]:
    argv: list[str] = []
    for name, value in args.items():
        if isinstance(value, bool) and arguments()[name].kind in ("bool", "flag"):
            negative = [f"--no-{name}"] if arguments()[name].kind == "bool" else []
            argv += [f"--{name}"] if value else negative
        elif isinstance(value, list) and arguments()[name].many:
            argv += [f"--{name}", *map(_word, value)] if value else []
        else:
            argv.append(f"--{name}={_word(value)}")  # one word: a value may begin with a dash
    return argv


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parse_one(argument: Argument, value: object) -> object:
    match argument.kind:
        case "bool" | "flag":
            return _of_type(bool, value, "true or false")
        case "int":
            return _in_range(argument.name, _of_type(int, value, "a whole number"))
        case "human-int" | "human-int-or-auto":
            return _human_int(argument, value)
        case "float":
            return _in_range(argument.name, float(_of_type((int, float), value, "a number")))
        case "json":
            return _json(value)
        case "json-or-str":
            return _json(value) if not isinstance(value, str) or value.lstrip().startswith("{") else value
        case "choice":
            return _choice(argument, value)
        case _:
            return _text(argument, value)


def _of_type(kind: type[T] | tuple[type[T], ...], value: object, what: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"is {value!r}, but must be {what}.")
    return value


def _in_range(name: str, number: N) -> N:
    if name in _AT_LEAST_ONE and number < 1:
        raise ValueError(f"is {number}, but must be at least 1.")
    if name in _SHARES and not 0 < number <= 1:
        raise ValueError(f"is {number:g}, but must be a share above 0 and up to 1.")
    return number


def _human_int(argument: Argument, value: object) -> object:
    if argument.kind == "human-int-or-auto" and value in ("auto", -1):
        return "auto"
    what = "a whole number, also as 16k (16,000) or 16K (16,384)"
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value.strip())
        if match is None or ("." in match[1] and match[2] not in _DECIMAL):
            raise ValueError(f"is {value!r}, but must be {what}.")
        unit = _DECIMAL.get(match[2]) or _BINARY.get(match[2]) or 1
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    return _in_range(argument.name, _of_type(int, value, what))


def _json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        text = f"is not JSON ({error}): write it as a YAML mapping or as JSON in quotes."
        raise ValueError(text) from error


def _choice(argument: Argument, value: object) -> object:
    if value not in argument.choices or isinstance(value, bool):
        allowed = ", ".join(map(str, argument.choices))
        raise ValueError(f"is {value!r}, but must be one of: {allowed}.")
    return value


def _text(argument: Argument, value: object) -> object:
    if argument.many and isinstance(value, dict):
        return value  # list items that are mappings (LoRA modules) go to vLLM as JSON
    if isinstance(value, bool | list | dict):
        raise ValueError(f"is {value!r}, but must be a text.")
    return str(value)
