"""Saves the wire protocol of a release in `tests/wire/`: the definitions of all messages, one encoded message of each
class, and the names that both sides must know.

`python -m tools.wire` (`make wire`) replaces the last release's protocol with this build's. Run it after each release:
`tests/wire/test_neighbours.py` checks each build against the last release (docs/decisions/0072-neighbours.md)."""

import ast
import enum
import json
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

import pdserve
from pdserve import kv
from pdserve.contract import live_settings, messages, records, reports
from pdserve.queue.jetstream import stream
from pdserve.registry import keys
from pdserve.security import credentials
from pdserve.stream import tcp
from pdserve.supervisor import state

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests/wire"
DEFINITIONS, COMMIT = "definitions.txt", "commit"
SOURCES = (messages, records, reports, state)
MSGPACK = (
    "ToDecode",
    "ToFrontend",
    "PrefillRequest",
    "ToPrefill",
    "PrefillAnswer",
    "QueueState",
    "PrefillPrefixes",
    "HeldRequests",
)
"""Messages in msgpack: on streams and in the queue."""
JSON = (
    "Instance",
    "SlotState",
    "ModelCard",
    "Adapter",
    "NodeLeader",
    "NodeFollower",
    "Watched",
    "Receipt",
    "GraphRecord",
)
"""Records in JSON: in etcd, on pages of processes, and in the state directory."""
RENAMED = {"Watched": "ProcessReport"}
"""Name of a class in the last release -> in this build. Neither name is ever sent."""
_BASES = {"Struct", "StrEnum"}


class Protocol(NamedTuple):
    """The message classes of a version of pdserve."""

    version: str
    wire: int
    module: Any
    """Namespace of the classes and unions named in MSGPACK and JSON."""

    def kinds(self, root: str) -> dict[str, Any]:
        """Return the members of the union `root` (or the one class) by their name in the last release."""
        defined = self.defined(root)
        return {_former(each): each for each in typing.get_args(defined) or (defined,)}

    def defined(self, root: str) -> Any:
        """Return the class or union; None if this version has none."""
        return getattr(self.module, root, None) or getattr(self.module, RENAMED.get(root, ""), None)

    def decoder(self, root: str) -> Callable[[bytes], Any]:
        library = msgspec.json if root in JSON else msgspec.msgpack
        decode: Callable[[bytes], Any] = library.Decoder(self.defined(root)).decode
        return decode


def _former(kind: Any) -> str:
    return next((old for old, new in RENAMED.items() if new == kind.__name__), kind.__name__)


def encode(root: str, message: Any) -> bytes:
    return msgspec.json.encode(message) if root in JSON else msgspec.msgpack.encode(message)


def today() -> Protocol:
    names = {name: value for module in reversed(SOURCES) for name, value in vars(module).items()}
    return Protocol(pdserve.__version__, records.WIRE, types.SimpleNamespace(**names))


def released() -> Path:
    """The folder of the last release."""
    (folder,) = (path for path in KEPT.iterdir() if (path / DEFINITIONS).exists())
    return folder


def read(text: str, version: str) -> Protocol:
    """Execute the definitions of a version and return its protocol."""
    module = types.ModuleType(f"definitions of {version}")
    sys.modules[module.__name__] = module  # where msgspec resolves the types of fields
    exec(text, vars(module))
    return Protocol(version, module.WIRE, module)


def variants(kind: Any) -> list[Any]:
    """Return messages of this class with all fields set. Together they have each alternative of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    possible = {name: values(hint) for name, hint in hints.items()}
    first = {name: each[0] for name, each in possible.items()}
    others = ({**first, name: value} for name, each in possible.items() for value in each[1:])
    return [kind(**fields) for fields in (first, *others)]


_PLAIN: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [3],
    float: [0.5],
    str: ["text"],
    bytes: [b"\x00bytes"],
    object: ["anything"],
    types.NoneType: [None],
    UnsetType: [UNSET],
}


def values(hint: Any) -> list[Any]:
    """Return one value for each alternative of a type: each member of an enum or union, an empty and a full list."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Annotated:
            return values(arguments[0])
        case typing.Union | types.UnionType:
            return [*chain.from_iterable(map(values, arguments))]
        case origin if origin is list:
            return [values(arguments[0]), []]
        case origin if origin is dict:
            return [{"text": value} for value in values(arguments[1])]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)
    return _PLAIN[hint] if hint in _PLAIN else variants(hint)


_LIMITS = ("ack_wait", "bound", "max_bytes", "max_age")
_SETTINGS = (*live_settings.SETTINGS, *live_settings.POLICIES, *live_settings.PREFILL_POLICIES)


def names() -> dict[str, Any]:
    """Return the names and limits that must be equal on both sides."""
    queue = stream.QueueNames("graph", "a/model", "0123456789abcdef")
    instance = records.Instance(id="decode-0-0a", role=records.Role.DECODE)
    return {
        "greeting of a stream": tcp.GREETING.decode(),
        "queue: stream": queue.stream,
        "queue: consumer": stream.CONSUMER,
        "queue: requests": queue.requests,
        "queue: state": queue.state,
        "queue: held": queue.held,
        "queue: notices": queue.notices,
        "queue: answers": queue.answers("decode-0-0a"),
        "queue: warm-ups": queue.addressed("prefill-0-0a"),
        **{f"queue: {name}": getattr(stream.StreamLimits(), name) for name in _LIMITS},
        "etcd: instance": keys.instance(instance),
        "etcd: newcomer": keys.newcomer(instance),
        "etcd: card": keys.card("a/model", instance.id),
        "etcd: setting": keys.setting("router"),
        "etcd: slot": keys.slot(records.SlotState("decode-0", records.Role.DECODE, "host")),
        **{f"setting: {word}": word for word in _SETTINGS},
        "handle: preempted": kv.PREEMPTED,
        "certificate": credentials.CERTIFICATE_NAME,
    }


def definitions() -> str:
    """Return the source of all message classes, without docstrings and methods, in the order of their definition."""
    lines = [
        "import math",
        "from enum import StrEnum",
        "from typing import Annotated",
        "import msgspec",
        "from msgspec import UNSET, Meta, Struct, UnsetType",
        f"WIRE = {records.WIRE}",
    ]
    for module in SOURCES:
        assert module.__file__
        lines += map(ast.unparse, _records(ast.parse(Path(module.__file__).read_text())))
    return "\n\n".join(lines) + "\n"


def _records(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the classes, the unions, and constants that are defaults of fields."""
    inside = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
    values = [each.value for each in inside if isinstance(each, ast.AnnAssign) and each.value]
    defaults = {value.id for value in values if isinstance(value, ast.Name)}
    for node in tree.body:
        match node:
            case ast.ClassDef(bases=[base, *_]) if ast.unparse(base).rpartition(".")[2] in _BASES:
                fields = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
                node.body = [*fields] or [ast.Pass()]
                yield node
            case ast.Assign(targets=[ast.Name(id=name)]) if name in MSGPACK or name in defaults:
                yield node


def keep(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / DEFINITIONS).write_text(definitions())
    (folder / "names.json").write_text(json.dumps(names(), indent=2) + "\n")
    for root in (*MSGPACK, *JSON):
        for name, kind in today().kinds(root).items():
            (folder / f"{root}.{name}").write_bytes(encode(root, variants(kind)[0]))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / COMMIT).write_text(head.stdout)
    hello = messages.encode(messages.Hello("0.32.0"))
    (folder / "stream.sent").write_bytes(_framed(tcp.GREETING + b" frontend-0-0a.1") + _framed(hello))
    (folder / "stream.received").write_bytes(_framed(tcp.GREETING))


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def main() -> None:
    shutil.rmtree(released())
    keep(KEPT / pdserve.__version__)


if __name__ == "__main__":
    main()
