"""This build and the last release, whose messages are kept beside this file, understand each other. During an upgrade
both run on one NATS and etcd (docs/decisions/0072-neighbours.md)."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.contract.messages import Hello
from pdserve.stream.tcp import TcpStreamServer
from tools import wire
from tools.wire import JSON, MSGPACK, Protocol

TODAY, KEPT = wire.today(), wire.released()
DEFINITIONS = (KEPT / wire.DEFINITIONS).read_text()
RELEASED = wire.read(DEFINITIONS, KEPT.name)
ROOTS = [root for root in (*MSGPACK, *JSON) if RELEASED.defined(root)]
FILES = [path.name for path in KEPT.iterdir() if path.name.split(".")[0] in ROOTS]

DROPPED: frozenset[str] = frozenset(
    {
        "PrefillConfirm",
        "PrefillDone.age",
        "PrefillDone.token",
        "PrefillDone.handle.computed_at",
        "PrefillProgress.handle.computed_at",
    }
)
"""`Message.field`, kinds of messages and names that the last release has but does not need. This build lacks them, and
its WIRE is one higher. Empty after each release."""
ASKED_FOR: dict[str, str] = {}
"""Kind of message that the last release does not know -> field of `Hello` or `Instance` by which a process says that it
reads this kind. The message is not sent to other processes, because a frontend of 0.1.0 closes the connection at an
unknown kind."""

ADVICE = f"""
{KEPT.name} is the last release, and both builds run beside each other during an upgrade. So:
- a new field gets a default, and its readers do without it;
- a field keeps its name and type, and what is sent in it stays within that type;
- what the last release reads stays until a release that does not read it: only then put it into DROPPED and raise WIRE;
- a new kind of message is sent only to those that ask for it: name it, and how they ask, in ASKED_FOR.
docs/decisions/0072-neighbours.md has the reasons. Never edit what is kept: `make release` writes it."""


def differences(sent: Any, read: Any, at: str) -> Iterator[str]:
    """Yield each part that was not read as it was sent. A field that is read but not sent is a difference;
    a field that is sent but not read is none."""
    if isinstance(sent, dict) and isinstance(read, dict):
        for name in read:
            if f"{at}.{name}" in DROPPED:
                continue
            if name not in sent:
                yield f"{at}.{name} is not sent any more"
            else:
                yield from differences(sent[name], read[name], f"{at}.{name}")
    elif isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        for each, other in zip(sent, read, strict=True):
            yield from differences(each, other, at)
    elif sent != read:
        yield f"{at} is sent as {sent!r} and read as {read!r}"


def crossing(sender: Protocol, reader: Protocol, root: str) -> Iterator[str]:
    """Yield problems of `sender`'s messages that `reader` decodes as `root`."""
    decode, known = reader.decoder(root), reader.kinds(root)
    for name, kind in sender.kinds(root).items():
        if name in DROPPED or (name in ASKED_FOR and name not in known):
            continue
        for message in wire.variants(kind):
            try:
                read = decode(wire.encode(root, message))
            except msgspec.MsgspecError as error:
                yield f"{reader.version} cannot read a {name} of {sender.version}: {error}"
                break
            yield from differences(msgspec.to_builtins(message), msgspec.to_builtins(read), name)


def without_new(problems: Iterator[str]) -> list[str]:
    """Leave out problems with fields that an older sender does not know: these fields have defaults."""
    return [problem for problem in dict.fromkeys(problems) if "is not sent any more" not in problem]


@pytest.mark.parametrize("root", ROOTS)
def test_the_last_release_reads_what_this_build_sends(root: str) -> None:
    assert list(dict.fromkeys(crossing(TODAY, RELEASED, root))) == [], ADVICE


@pytest.mark.parametrize("root", ROOTS)
def test_this_build_reads_what_the_last_release_sends(root: str) -> None:
    assert without_new(crossing(RELEASED, TODAY, root)) == [], ADVICE


@pytest.mark.parametrize("file", FILES)
def test_the_bytes_of_the_last_release_are_read(file: str) -> None:
    path, (root, name) = KEPT / file, file.split(".")
    if name in DROPPED:
        return
    library = msgspec.json if root in JSON else msgspec.msgpack
    sent, read = library.decode(path.read_bytes()), TODAY.decoder(root)(path.read_bytes())
    assert type(read) is TODAY.kinds(root)[name]
    shared = library.decode(wire.encode(root, read))
    assert list(differences(shared, sent, name)) == [], ADVICE


def test_the_next_release_keeps_each_message_that_is_decoded(tmp_path: Path) -> None:
    wire.keep(folder := tmp_path / "next")
    kept = wire.read((folder / wire.DEFINITIONS).read_text(), folder.name)
    roots = {*MSGPACK, *JSON}
    for root in roots:
        for kind in TODAY.kinds(root):
            assert kept.decoder(root)((folder / f"{root}.{kind}").read_bytes())
    sources = "".join(path.read_text() for path in (wire.ROOT / "pdserve").rglob("*.py"))
    found = re.findall(r"Decoder\((?:list\[)?(\w+)|decode\(.*type=(\w+)\)", sources)
    decoded = {one or other for one, other in found} & vars(kept.module).keys()
    assert decoded >= {"ToDecode", "Instance", "GraphRecord"}
    assert decoded - {wire.RENAMED.get(root, root) for root in roots} == set(), "add them to tools/wire.py"


def test_shared_names_are_those_of_the_last_release() -> None:
    kept, now = json.loads((KEPT / "names.json").read_text()), json.loads(json.dumps(wire.names()))
    assert {
        name: now.get(name) for name in kept if name not in DROPPED and now.get(name) != kept[name]
    } == {}, (
        f"{ADVICE}\nTwo builds with different limits of the queue reset the stream to theirs every ten seconds."
    )


def test_the_wire_generation_rises_when_something_is_dropped() -> None:
    assert TODAY.wire == RELEASED.wire + bool(DROPPED), (
        "WIRE in contract/records.py must be the last release's, plus one if DROPPED has entries"
    )


async def test_messages_of_a_frontend_of_the_last_release_are_read() -> None:
    async with TcpStreamServer("127.0.0.1") as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((KEPT / "stream.sent").read_bytes())
        received = (KEPT / "stream.received").read_bytes()
        assert await reader.readexactly(len(received)) == received
        assert await anext(server.received()) == ("frontend-0-0a.1", Hello("0.32.0"))
        writer.close()


@pytest.mark.parametrize(
    ("root", "line", "changed", "problem"),
    [
        ("ToDecode", "timeout: float", "timeout: float\n    hue: int", "missing required field `hue`"),
        ("ToDecode", "client: str", "customer: str", "Submit.client is not sent any more"),
        ("ToDecode", "timeout: float", "timeout: str", "Expected `float`, got `str`"),
        ("ToDecode", "engines_died: int", "engines_died: int | None", "Expected `int`, got `None`"),
        ("ToFrontend", "WorkerLoad |", "WorkerLoad | Cancel |", "Invalid value 'Cancel'"),
        ("Instance", "BOTH = 'both'", "BOTH = 'both'\n    ALL = 'all'", "Invalid enum value 'all'"),
    ],
)
def test_an_incompatible_change_is_named(root: str, line: str, changed: str, problem: str) -> None:
    other = wire.read(DEFINITIONS.replace(line, changed, 1), "0.2.0")
    found = [*crossing(other, RELEASED, root), *without_new(crossing(RELEASED, other, root))]
    assert [text for text in found if problem in text] != []


def test_a_field_with_a_default_is_compatible() -> None:
    other = wire.read(DEFINITIONS.replace("migrated:", "hue: int = 0\n    migrated:", 1), "0.2.0")
    assert list(crossing(other, RELEASED, "ToDecode")) == []
    assert without_new(crossing(RELEASED, other, "ToDecode")) == []
