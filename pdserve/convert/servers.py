"""Finds vLLM servers in what other tools are started with: a flat YAML of `vllm serve --config`, a command line, a
shell script, a manifest of Kubernetes (Dynamo's DynamoGraphDeployment among them) or a Compose file.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config.arguments import arguments, canonical
from pdserve.config.removed import is_flat, removed
from pdserve.config.schema import kebab
from pdserve.config.tree import read_documents
from pdserve.errors import ConfigError

_ENTRY = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "dynamo.vllm")
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-n": "nnodes",
}
_DYNAMO = re.compile(
    r"is-(prefill|decode)-worker|disaggregation-mode|connector|migration-limit|endpoint|endpoint-types|"
    r"(dyn|request-plane|store-kv|discovery|event-plane|multimodal|route-to-encoder|router|http|kv-cache-routing).*"
)
NUMBERS = {"int": int, "float": float}


@dataclass
class Server:
    """A vLLM engine with its server, or a worker of a Dynamo graph."""

    args: dict[str, Any] = field(default_factory=dict)
    """vLLM's arguments by canonical name"""
    dropped: dict[str, str] = field(default_factory=dict)
    """an argument that pdserve does not take -> why"""
    role: str = "both"
    """`prefill`, `decode`, or `both`: neither is separated"""
    count: int = 1
    """replicas"""

    def put(self, name: str, value: object, written: str) -> None:
        """Take an argument as a file or a command line has it."""
        known = canonical(name)
        if known is not None:
            many = arguments()[known].many
            self.args[known] = [*self.args.get(known, []), *_listed(value)] if many else value
        elif gone := removed(name):
            self.dropped[written] = gone.reason
        elif _DYNAMO.fullmatch(name):
            self._dynamo(name, value)
        else:
            self.dropped[written] = "is no argument of vLLM 0.32."

    def _dynamo(self, name: str, value: object) -> None:
        if name in ("is-prefill-worker", "is-decode-worker"):
            self.role = name.split("-")[1]
        elif name == "disaggregation-mode" and value in ("prefill", "decode"):
            self.role = str(value)
        else:
            self.dropped[name] = "is of Dynamo and has no meaning here."


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def servers_of(source: str) -> list[Server]:
    """What the file, or the command line, starts. Raises ConfigError if it has no vLLM server."""
    path = Path(source)
    if not path.is_file():
        if " " not in source.strip():
            raise ConfigError([f"{source} is not there: give a file, or a command line after `--from --`."])
        return _of_commands([shlex.split(source)], source)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{source} cannot be read: {error}."]) from error
    if path.suffix in (".yaml", ".yml", ".json"):
        documents = [each for each in read_documents(text, path) if isinstance(each, dict)]
        if len(documents) == 1 and is_flat(documents[0]):
            return [_of_mapping(documents[0])]
        if found := [server for document in documents for server in _of_manifest(document)]:
            return found
        raise ConfigError([f"{source} starts no vLLM server: neither its keys nor a command in it do."])
    return _of_commands(list(_commands_of(text)), source)


def _of_mapping(document: Mapping[Any, object]) -> Server:
    server = Server()
    for written, value in document.items():
        name = kebab(str(written))
        server.put("model" if name == "model-tag" else name, value, str(written))
    return server


# command lines


def _commands_of(script: str) -> Iterator[list[str]]:
    """The commands of a shell script, with its own plain variables put in."""
    variables: dict[str, str] = {}
    for line in script.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = re.sub(rf"\$\{{{name}\}}|\${name}\b", value.replace("\\", r"\\"), line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        words = words[1:] if words[:1] == ["export"] else words
        variables |= dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))
        yield words


def _of_commands(commands: Sequence[list[str]], source: str) -> list[Server]:
    found = [server for words in commands if (server := of_command(words)) is not None]
    if not found:
        raise ConfigError([f"{source} starts no vLLM server: there is no `vllm serve` in it."])
    return found


def of_command(words: Sequence[str]) -> Server | None:
    """The server that a command starts; None if it starts another program."""
    start = _start_of(words)
    if start is None:
        return None
    server, rest = Server(), list(words[start:])
    while rest:
        word = rest.pop(0)
        if word in (";", "&&", "||", "|", "&", ">", ">>", "2>&1") or word.startswith((">", "2>")):
            break
        if not word.startswith("-"):
            server.args.setdefault("model", word)
            continue
        option, _, given = word.partition("=")
        name = _SHORT.get(option) or kebab(option.lstrip("-"))
        negative = name.startswith("no-") and canonical(name) is None
        known = canonical(name.removeprefix("no-") if negative else name)
        if known and arguments()[known].kind in ("bool", "flag"):
            server.put(known, not negative, option)
        elif given:
            server.put(name, typed(known, given), option)
        else:
            values = _values_of(rest, many=bool(known and arguments()[known].many))
            value = [typed(known, each) for each in values] if len(values) != 1 else typed(known, values[0])
            server.put(name, value if values else True, option)
    return server


def _start_of(words: Sequence[str]) -> int | None:
    """The place of the first argument."""
    for at, word in enumerate(words):
        if word in _ENTRY or (word == "serve" and at and Path(words[at - 1]).name == "vllm"):
            return at + 1
        if "vllm-openai" in word and not word.startswith("-"):  # the image of `docker run`
            return at + 1
    return None


def _values_of(rest: list[str], many: bool) -> list[str]:
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (many or not values):
        values.append(rest.pop(0))
    return values


def typed(known: str | None, text: str) -> object:
    """The text as a file would have it."""
    kind = arguments()[known].kind if known else "str"
    try:
        if kind in NUMBERS:
            return NUMBERS[kind](text)
        return json.loads(text) if kind == "json" or text.startswith("{") else text
    except ValueError:
        return text


# manifests


def graph_in(source: str) -> dict[str, dict[str, Any]] | None:
    """The sections of the graph that a manifest of Dynamo 0.3 carries in a variable; None if it has none."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml", ".json") or not path.is_file():
        return None
    for document in read_documents(path.read_text("utf-8", "replace"), path):
        spec = document.get("spec") if isinstance(document, dict) else None
        for variable in (spec.get("envs") or []) if isinstance(spec, dict) else []:
            if isinstance(variable, dict) and variable.get("name") == "DYN_DEPLOYMENT_CONFIG":
                sections = json.loads(str(variable.get("value")))
                return {name: each for name, each in sections.items() if isinstance(each, dict)}
    return None


def _of_manifest(node: object, count: int = 1) -> Iterator[Server]:
    """The servers of the containers in it, wherever they are."""
    if isinstance(node, list):
        for each in node:
            yield from _of_manifest(each, count)
    if not isinstance(node, dict):
        return
    count = node.get("replicas", count) if isinstance(node.get("replicas", count), int) else count
    words = [word for key in ("command", "args") for word in _words(node.get(key))]
    server = of_command(_unwrapped(words, str(node.get("image", "")))) if words else None
    if server is not None:
        server.count = count
        yield server
        return
    role = str(node.get("subComponentType", "both"))
    nodes = (
        (node.get("multinode") or {}).get("nodeCount", 1) if isinstance(node.get("multinode"), dict) else 1
    )
    for each in node.values():
        for found in _of_manifest(each, count):
            if found.role == "both" and role in ("prefill", "decode"):
                found.role = role
            if nodes > 1:
                found.args.setdefault("nnodes", nodes)
            yield found


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    return [str(word) for word in value] if isinstance(value, list) else []


def _unwrapped(words: list[str], image: str) -> list[str]:
    """Without the shell round it; with the image where the container has arguments only."""
    if len(words) >= 3 and Path(words[0]).name in ("sh", "bash") and words[1].endswith("c"):
        return next((each for each in _commands_of(words[2]) if _start_of(each) is not None), [])
    return words if _start_of(words) is not None else [image, *words]
