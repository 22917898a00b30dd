"""vLLM's argument list, read from a JSON file because importing vLLM takes seconds.

`python -m tools.vllm_arguments` writes the file, and a test asserts that it equals the installed vLLM's list.
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
"""Role -> `kv_role` of vLLM. BOTH needs no `kv_both` (deprecated): with NIXL, a `kv_consumer` sends KV too."""


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
    """vLLM's own parsers, if the argument chooses one; a plugin may add others"""


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
"""Counts that vLLM's parser accepts below 1, and its engine refuses a minute later."""
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_REFUSED = {
    "config": "would read a second file of arguments; write them here instead.",
    "host": "belongs in Frontend (where clients connect) or in Graph (where the other workers connect).",
    "port": "belongs in Frontend; workers choose their own ports.",
    "api-server-count": "is Frontend.ServiceArgs.workers in pdserve; set that.",
    "served-model-name": "belongs in Frontend, because every worker of a graph serves the same name.",
    "kv-events-config": "is set by pdserve, which finds prefix hits with it; remove it.",
    "kv-offloading-size": "is kv-offload in pdserve, as in kv-offload: 32GiB; set that.",
    "kv-offloading-backend": "is kv-offload in pdserve, as in kv-offload: 32GiB; set that.",
    "ec-transfer-config": "is for separate encoders, which pdserve does not have; remove it.",
    "disable-log-stats": "would turn off statistics that routing and `pdserve status` need; remove it.",
    "otlp-traces-endpoint": "is Graph.otlp-endpoint in pdserve, which traces the whole graph; set it there.",
    "collect-detailed-traces": "needs vLLM's own traces; pdserve's are set by Graph.otlp-endpoint; remove it.",
    "device-ids": "is chosen by pdserve; use ServiceArgs.resources.gpu or .gpu-ids.",
    "node-rank": "differs by host: start `pdserve decode` or `pdserve prefill` with --node-rank there; remove it.",
    "master-addr": "is not needed, because the hosts of a worker (nnodes) find each other in etcd; remove it.",
    "master-port": "is not needed, because the hosts of a worker (nnodes) find each other in etcd; remove it.",
    "worker-extension-cls": "is set by pdserve, whose own extension enables AMX; remove it.",
    "runner": "is always generate in pdserve; remove it.",
    "convert": "would make an embedding model, which cannot decode; remove it.",
    "skip-tokenizer-init": "would leave the frontends without a tokenizer; remove it.",
    "enable-elastic-ep": "changes the number of ranks while running, which breaks KV transfer; remove it.",
}
"""vLLM arguments that a file may not set, with the reason as the end of a sentence that begins with the key."""


SAMPLING_ARGUMENTS = {
    "enable-return-routed-experts",
    "logits-processors",
    "logprobs-mode",
    "return-sampling-mask",
    "watermark",
    "watermark-config",
}
"""Engine arguments that change which tokens an engine samples, or their logprobs."""
SPECULATION_ARGUMENTS = {
    "speculative-config": "",
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
"""Engine arguments of speculative decoding -> the key of speculative-config that each sets; empty: all keys."""
_WITHOUT_MODEL = {"ngram", "[ngram]", "ngram_gpu", "suffix"}
"""Methods of speculative decoding without a draft model: they take drafts from the tokens so far."""
RESPONSE_ARGUMENTS = SAMPLING_ARGUMENTS | {
    "max-logprobs",
    "reasoning-config",
    "reasoning-parser",
    "reasoning-parser-plugin",
    "structured-outputs-config",
}
"""Engine arguments that change what a request may ask for, or its response."""


@cache
def arguments() -> Mapping[str, Argument]:
    file = msgspec.json.decode(PATH.read_bytes(), type=_ArgumentFile)
    return {argument.name: argument for argument in file.arguments}


@cache
def canonical(name: str) -> str | None:
    """Return vLLM's own name of the argument that has this name or alias; None if vLLM has none."""
    if name in arguments():
        return name
    return next((known.name for known in arguments().values() if name in known.aliases), None)


def parse(name: str, value: object) -> object:
    """Parse the value as vLLM does: 16k is a number, JSON text a mapping. `name` is canonical. Raises ValueError with
    the end of a sentence that begins with the key."""
    argument = arguments()[name]
    if value is None:
        raise ValueError("has no value: give it one or remove the line.")
    if not argument.many:
        return _parse_one(argument, value)
    values = value if isinstance(value, list) else [value]
    return [_parse_one(argument, item) for item in values]


def refusal(name: str) -> str | None:
    """Return why a worker cannot have the argument (the end of a sentence that begins with its key), or None."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name.startswith("data-parallel-"):
        return "is ServiceArgs.workers in pdserve: each worker is an engine of its own; remove it."
    if arguments()[name].group == "server":
        return "is for vLLM's own HTTP server, which a worker does not have; remove it."
    return None


def shapes_response(name: str) -> bool:
    """Whether the worker's model card takes the argument to frontends. Decode engines also need the reasoning
    arguments: a grammar applies only after the reasoning."""
    return arguments()[name].group == "api" or name.startswith("reasoning-")


def for_engine(args: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that vLLM's engine parser takes, without those of the API (templates, parsers)."""
    return {name: value for name, value in args.items() if arguments()[name].group != "api"}


def speculation(args: Mapping[str, object]) -> dict[str, object]:
    """Return vLLM's speculative-config with the keys that other arguments set; empty without speculative decoding."""
    given = args.get("speculative-config")
    found = dict(given) if isinstance(given, dict) else {}
    return found | {key: args[name] for name, key in SPECULATION_ARGUMENTS.items() if key and name in args}


def draft_model(args: Mapping[str, object]) -> dict[str, object] | None:
    """Return the speculative-config if its drafts come from layers with weights and KV (a draft model, EAGLE, MTP),
    else None."""
    found = speculation(args)
    without_model = str(found.get("method", found.get("model"))) in _WITHOUT_MODEL
    return None if without_model or not found else found


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
    if name == "gpu-memory-utilization" and not 0 < number <= 1:
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
