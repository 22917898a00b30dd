"""Finds the vLLM servers that a file of another tool starts.

Reads a flat YAML of `vllm serve --config`, a command line, a shell script, a Compose file, or a Kubernetes manifest
such as a DynamoGraphDeployment.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pdserve.config.engine_args.arguments import arguments, canonical
from pdserve.config.engine_args.removed import is_vllm_config, removed
from pdserve.config.files.yaml_tree import read_documents
from pdserve.config.schema import kebab
from pdserve.config.sections import KINDS
from pdserve.convert.shell import Unset, commands_of, script_in, substituted
from pdserve.util.errors import ConfigError

_FRONTEND = "dynamo.frontend"
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "dynamo.vllm", _FRONTEND)
_OTHER_PROGRAMS = ("echo", "printf", "which", "pgrep", "pkill", "grep", "man")
"""Programs whose arguments may name vLLM, but which do not start it."""
_YAML = (".yaml", ".yml", ".json")
_KV_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
_DYNAMO = re.compile(
    r"is-(prefill|decode)-worker|disaggregation-mode|connector|migration-limit|endpoint|endpoint-types|"
    r"(dyn|request-plane|store-kv|discovery|event-plane|multimodal|route-to-encoder|router|http|kv-cache-routing).*"
)
"""Arguments of Dynamo's own components."""
_BOOLEANS = {"true": True, "false": False}
_NUMBERS = {"int": int, "float": float}


@dataclass
class Server:
    """A vLLM server, or a component of a Dynamo graph."""

    args: dict[str, Any] = field(default_factory=dict)
    """vLLM arguments by canonical name."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Arguments that pdserve does not take -> the reason."""
    role: str = "both"
    """`prefill`, `decode` or `both`, or `frontend` for Dynamo's frontend, which has no engine."""
    count: int = 1
    """Replicas."""

    def put(self, name: str, value: object, written: str) -> None:
        """Add an argument; `written` is its name in the file or the command line."""
        name, *keys = name.split(".")
        known = canonical(kebab(name))
        missing = [each.missing for each in _as_list(value) if isinstance(each, Unset)]
        if missing:
            self.dropped[written] = (
                f"has {' '.join(missing)}, which the file does not set: set it in the graph."
            )
        elif known is not None and keys and arguments()[known].kind.startswith("json"):
            inside = self.args
            for key in (known, *keys[:-1]):
                inside[key] = inside = dict(inside[key]) if isinstance(inside.get(key), dict) else {}
            inside[keys[-1]] = value
        elif known is not None and not keys:
            self.args[known] = _as_list(value) if arguments()[known].many else value
            if known == "kv-transfer-config" and isinstance(value, dict) and self.role == "both":
                self.role = _KV_ROLES.get(str(value.get("kv_role")), "both")
        elif gone := removed(kebab(name)):
            self.dropped[written] = gone.reason
        elif _DYNAMO.fullmatch(name := kebab(name)):
            self._put_dynamo(name, value)
        else:
            self.dropped[written] = "is no argument of vLLM 0.32."

    def _put_dynamo(self, name: str, value: object) -> None:
        if name in ("is-prefill-worker", "is-decode-worker"):
            self.role = name.split("-")[1]
        elif name == "disaggregation-mode" and value in ("prefill", "decode"):
            self.role = str(value)
        elif name == "http-port" and self.role == "frontend":
            self.args["port"] = int(str(value)) if str(value).isdecimal() else value
        elif name == "router-mode" and self.role == "frontend":
            self.args["router"] = value
        else:
            self.dropped[name] = "is an argument of Dynamo that pdserve does not need."


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def servers_of(source: str) -> list[Server]:
    """Return the servers that a file or a command line starts. Raises ConfigError if there is no vLLM server."""
    path = Path(source)
    if not path.is_file():
        if " " not in source.strip():
            raise ConfigError([f"{source} not found: give a file, or a command line after `--from --`."])
        return _of_commands(commands_of(source), source)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{source} cannot be read: {error}."]) from error
    if path.suffix not in _YAML:
        return _of_commands(commands_of(text), source)
    documents = [each for each in read_documents(text, path) if isinstance(each, dict)]
    if len(documents) == 1 and is_vllm_config(documents[0]):
        return [_of_mapping(documents[0])]
    try:
        found = [server for document in documents for server in _of_manifest(document)]
    except RecursionError:
        text = "is nested too deeply, or has an alias to a mapping that contains the alias"
        raise ConfigError([f"{source} {text}."]) from None
    if all(server.role == "frontend" for server in found):
        if any(name in KINDS for document in documents for name in document):
            raise ConfigError([f"{source} is a graph already: pdserve serve -f {source}"])
        text = "it has no command of vLLM. For a Helm chart, use the output of `helm template`."
        raise ConfigError([f"{source} starts no vLLM server: {text}"])
    return found


def _of_mapping(document: Mapping[Any, object]) -> Server:
    server = Server()
    for written, value in document.items():
        name = "model" if kebab(str(written)) == "model-tag" else str(written)
        value = _typed(canonical(kebab(name)), value) if isinstance(value, str) else value
        server.put(name, value, str(written))
    return server


# command lines


def _of_commands(commands: Iterable[list[str]], source: str) -> list[Server]:
    """Return the commands' servers. Equal commands count once, because their servers would share a port. Dynamo's
    workers have no port, so that all of them count."""
    found = list[Server]()
    for words in commands:
        server = _of_command(words)
        if server is not None and (server not in found or "dynamo.vllm" in words):
            found.append(server)
    if all(server.role == "frontend" for server in found):
        raise ConfigError([f"{source} starts no vLLM server: there is no `vllm serve` in it."])
    return found


def _of_command(words: Sequence[str]) -> Server | None:
    """Return the server that a command starts; None if it starts another program."""
    start = _first_argument(words)
    if start is None:
        return None
    server, rest = Server(role="frontend" if words[start - 1] == _FRONTEND else "both"), list(words[start:])
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            _put_option(server, word, rest)
        else:
            _put_positional(server, word)
    return server


def _put_option(server: Server, word: str, rest: list[str]) -> None:
    """Add an option with its values, which are taken from the rest of the command line."""
    option, _, given = word.partition("=")
    given = Unset(given, word.missing) if isinstance(word, Unset) else given
    if re.fullmatch(r"-O\w*", option):  # vLLM rewrites -O before it parses options
        option, given = "--optimization-level", option[2:] or given
    first, dot, inside = option.partition(".")
    name = (_short_options().get(first) or kebab(first.lstrip("-"))) + dot + inside
    is_negative = name.startswith("no-") and canonical(name) is None
    known = canonical(name.removeprefix("no-") if is_negative else name.partition(".")[0])
    if known and arguments()[known].kind in ("bool", "flag"):
        given = given or (rest.pop(0) if rest and rest[0].lower() in _BOOLEANS else "true")
        value = _BOOLEANS.get(given.lower(), True) is not is_negative
        server.put(known, given if isinstance(given, Unset) else value, option)
    elif given or "=" in word:
        server.put(name, _typed(known, given, bool(dot)), option)
    else:
        many = arguments()[known].many if known else bool(_DYNAMO.fullmatch(name))
        values = [_typed(known, each, bool(dot)) for each in _values_of(rest, many)]
        server.put(name, values if len(values) > 1 else values[0] if values else True, option)


@cache
def _short_options() -> dict[str, str]:
    return {short: argument.name for argument in arguments().values() for short in argument.short}


def _put_positional(server: Server, word: str) -> None:
    if "model" not in server.args and "the model" not in server.dropped:
        server.put("model", word, "the model")
    elif isinstance(word, Unset):
        server.dropped[word.missing] = "is not set in the file: put what it stands for in the graph."
    else:
        server.dropped["a word beside the model"] = "is one too many: vLLM takes one model."


def _first_argument(words: Sequence[str]) -> int | None:
    """Return the index of vLLM's first argument; None if the command does not start vLLM."""
    if not words or words[0] in _OTHER_PROGRAMS:
        return None
    for at, word in enumerate(words):
        if word in _MODULES or (word == "serve" and at and Path(words[at - 1]).name == "vllm"):
            return at + 1
    for at, word in enumerate(words):  # the image of `docker run`
        if "vllm-openai" in word and not word.startswith("-") and (at == 0 or "run" in words[:at]):
            return at + 1
    return None


def _values_of(rest: list[str], many: bool) -> list[str]:
    """Take an option's values from the rest. A word that begins with a dash is a value only if it is a number."""
    values = list[str]()
    while rest and re.match(r"[^-]|-\.?\d|$", rest[0]) and (many or not values):
        values.append(rest.pop(0))
    return values


def _typed(known: str | None, text: str, inside: bool = False) -> object:
    """Convert the text by the argument's kind, if possible. `inside`: the text is a key's value in a JSON argument."""
    argument = arguments()[known] if known else None
    kind = "json" if inside else argument.kind if argument else "str"
    if isinstance(text, Unset):
        return text
    try:
        if kind == "choice" and argument and text.isdecimal() and int(text) in argument.choices:
            return int(text)
        if kind in _NUMBERS:
            return _NUMBERS[kind](text)
        if kind.startswith("human-int") and text.isdecimal():
            return int(text)
        return json.loads(text) if kind == "json" or text.startswith("{") else text
    except ValueError:
        return text


# manifests


def graph_in(source: str) -> dict[str, dict[str, Any]] | None:
    """Return the graph's sections in the DYN_DEPLOYMENT_CONFIG of a Dynamo 0.3 manifest; None if it has none."""
    path = Path(source)
    if path.suffix not in _YAML or not path.is_file():
        return None
    for document in read_documents(path.read_text("utf-8", "replace"), path):
        spec = document.get("spec") if isinstance(document, dict) else None
        for variable in (spec.get("envs") or []) if isinstance(spec, dict) else []:
            if isinstance(variable, dict) and variable.get("name") == "DYN_DEPLOYMENT_CONFIG":
                try:
                    sections = dict(json.loads(str(variable.get("value"))))
                except (ValueError, TypeError):
                    raise ConfigError([f"{path}: DYN_DEPLOYMENT_CONFIG holds no JSON object."]) from None
                return {name: each for name, each in sections.items() if isinstance(each, dict)}
    return None


def _of_manifest(node: object, count: int = 1) -> Iterator[Server]:
    """Yield the servers of all containers in a part of a manifest; `count`: replicas of this part."""
    if isinstance(node, list):
        for each in node:
            yield from _of_manifest(each, count)
    if not isinstance(node, dict):
        return
    replicas = node.get("replicas")
    count = max(1, replicas) if isinstance(replicas, int) else count
    servers = [server for words in _commands_in(node) if (server := _of_command(words)) is not None]
    for server in servers:
        server.count = count
    if not servers:
        servers = [server for each in node.values() for server in _of_manifest(each, count)]
    multinode = node.get("multinode")
    nodes = multinode.get("nodeCount") if isinstance(multinode, dict) else 1
    for server in servers:
        if server.role == "both":
            server.role = _role_of(node)
        ranks, copies = (server.args.get(f"{name}-parallel-size", 1) for name in ("tensor", "data"))
        is_split = isinstance(ranks, int) and isinstance(nodes, int) and nodes > 1 and ranks % nodes == 0
        if is_split and copies == 1:
            server.args["nnodes"] = nodes
        yield server


def _role_of(node: Mapping[str, object]) -> str:
    """Return the role by the names and labels that Dynamo, llm-d, AIBrix and others use."""
    metadata = node.get("metadata")
    inside = metadata if isinstance(metadata, dict) else {}
    labels = inside.get("labels")
    names = [*map(node.get, ("subComponentType", "type", "role", "name")), inside.get("name")]
    names += labels.values() if isinstance(labels, dict) else []
    for name in map(str, names):
        if found := re.search(r"(?:^|[-_.])(prefill|decode)$", name):
            return found[1]
    return "both"


def _commands_in(node: Mapping[str, object]) -> list[list[str]]:
    """Return a container's commands with its environment filled in. The image's name replaces a missing program."""
    known = _environment_of(node.get("env") or node.get("environment"))
    words = list[str]()
    for value in (node.get("command"), node.get("args")):
        if isinstance(value, str):
            variables = {name: one[0] for name, one in known.items()}
            words += next(commands_of(value.replace("\n", " "), variables), [])
        elif isinstance(value, list):
            words += [
                re.sub(r"\$\((\w+)\)", lambda name: known.get(name[1], [name[0]])[0], str(word))
                for word in value
            ]
    found = list(script_in(words, known))
    if found == [words]:
        words = [word if isinstance(word, Unset) else substituted(word, known) for word in words]
        found = [words if _first_argument(words) is not None else [str(node.get("image", "")), *words]]
    return found


def _environment_of(value: object) -> dict[str, list[str]]:
    """Return the variables that a container of Kubernetes or Compose sets."""
    if isinstance(value, dict):
        pairs = [(str(name), each) for name, each in value.items()]
    else:
        entries = value if isinstance(value, list) else []
        lines = (str(each).partition("=") for each in entries if isinstance(each, str))
        pairs = [(str(each.get("name")), each.get("value")) for each in entries if isinstance(each, dict)]
        pairs += [(name, each) for name, is_set, each in lines if is_set]
    return {name: [str(each)] for name, each in pairs if each is not None}
