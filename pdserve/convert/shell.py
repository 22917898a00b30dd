"""Splits a shell script into commands and their words, and fills in the variables that the script itself sets.

It reads quotes, comments, continued lines, arrays, `${NAME:-default}` and scripts inside (`bash -c`) as a shell does,
but runs no conditions, loops or commands. A word that refers to a value that the script does not set is `Unset`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.util.errors import ConfigError

MAX_VARIABLE = 100_000
"""Maximum of a variable's characters plus its number of words."""


def _nested(left: str, right: str) -> str:
    """Return a possessive regex of four levels of brackets: a bracket that never closes costs linear time."""
    run, inside = rf"[^{left}{right}]{{1,4000}}+", "(?!)"
    for _ in range(4):
        inside = rf"\{left}(?:{run}|{inside}){{0,99}}+\{right}"
    return inside


_BRACED, _COMMAND = _nested("{", "}"), _nested("(", ")")
_PLACEHOLDER = "<[A-Za-z][^<>|&;\n]*>"
"""A value that the reader of a manual fills in: `<your-model>`."""
_TOKEN = re.compile(
    rf"""(?P<blank>[ \t\r]+|\\[ \t]*\r?\n) | (?P<comment>\#[^\n]*) | (?P<end>\n|\|\|?|&&|;;?|&(?!>))
    | (?P<placeholder>(?:--[\w-]+=)?{_PLACEHOLDER})(?=\s)
    | (?P<redirection>\d*(?:<<<|<<-?|>>|[<>]&|[<>])|&>>?) | (?P<array>[A-Za-z_]\w*\+?=\() | (?P<bracket>[()])
    | (?P<word>(?:(?<![A-Za-z])'[^']*'|'[^'\n]*'|"(?:\\.|[^"\\])*"|\${_BRACED}|\${_COMMAND}|`[^`]*`|\\.
        |[^\s'"\\`;&|<>()])+) | (?P<other>.)""",
    re.X | re.S,
)
_PIECE = re.compile(
    rf"""'[^']*' | "(?:\\.|[^"\\])*" | \\. | \${_BRACED} | \${_COMMAND} | `[^`]*` | [^'"\\$`]+ | \$\w+ | .""",
    re.X | re.S,
)
_REFERENCE = re.compile(rf"(\$(?:[A-Za-z_]\w*|{_BRACED}|{_COMMAND}|[\d@*\#?!(])|`[^`]*`)", re.S)
_PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.S)
_PREFIXES = {"export", "local", "readonly", "declare", "env", "if", "then", "else", "do", "{", "-a", "-x"}
"""Words that may stand before an assignment."""
Known = dict[str, list[str]]
"""Variable -> its value, or the words of an array."""


class Unset(str):
    """A word that refers to values that the script does not set; `missing` has the references."""

    missing: str

    def __new__(cls, text: str, missing: str) -> "Unset":
        word = super().__new__(cls, text)
        word.missing = missing
        return word


def commands_of(script: str, variables: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """Yield the words of each command. An array that no command uses counts as a command."""
    known: Known = {name: [value] for name, value in (variables or {}).items()}
    words, array, is_target = list[str](), "", False
    unused = dict[str, list[str]]()
    for match in _TOKEN.finditer(script + "\n"):
        kind, text = match.lastgroup, match[0]
        if kind == "word" and is_target:
            is_target = False
        elif kind == "word":
            text = text.removeprefix("ExecStart=")  # in a systemd unit
            if array or not _PREFIXES.issuperset(words) or not _assign(text, known):
                unused = {name: each for name, each in unused.items() if f"{{{name}[" not in text}
                words += _expanded(text, known)
        elif kind == "placeholder":
            words.append(Unset(text, text))
        elif kind == "redirection":
            is_target = True
        elif kind == "array":
            array, words = text.rstrip("(="), []
        elif array and text == ")":
            name = array.rstrip("+")
            known[name] = _bounded([*(known.get(name, []) if array != name else []), *words])
            unused[name], array, words = known[name], "", []
        elif (kind == "end" and not array) or kind == "bracket":
            yield from script_in(words, known)
            words, is_target = [], False
    yield from unused.values()


def _assign(text: str, known: Known) -> bool:
    """Set a variable if the word is `NAME=value` or `NAME+=value`; return whether it is."""
    assigned = re.match(r"([A-Za-z_]\w*)(\+?)=", text)
    if assigned is None:
        return False
    name, appends = assigned.groups()
    value = _joined(text[assigned.end() :], known)
    value = _concat(["".join(known.get(name, [])), value]) if appends else value
    if name not in known or not isinstance(value, Unset):  # an unknown value does not replace a default
        known[name] = _bounded([value])
    return True


def _bounded(words: list[str]) -> list[str]:
    if sum(map(len, words)) + len(words) > MAX_VARIABLE:
        text = f"a variable grows beyond {MAX_VARIABLE:,} characters: give the command of vLLM alone."
        raise ConfigError([text])
    return words


def script_in(words: Sequence[str], known: Known) -> Iterator[list[str]]:
    """Yield the commands of the script in `bash -c SCRIPT`, or else the words of the command itself."""
    shells = [at for at, word in enumerate(words) if Path(word).name in ("sh", "bash", "zsh", "dash")]
    for at, word in enumerate(words[:-1]):
        if shells and at > shells[0] and re.fullmatch("-[eiluxo]*c", word):
            script = next((each for each in words[at + 1 :] if each != "--"), "")
            yield from commands_of(script, {name: value[0] for name, value in known.items() if value})
            return
    if words:
        yield list(words)


def substituted(text: str, known: Known) -> str:
    """Replace the references in the text by their values; `Unset` if one has none."""
    parts = _REFERENCE.split(text)  # text and references in turn
    return _concat(_value(part, known) if at % 2 else part for at, part in enumerate(parts))


def _value(reference: str, known: Known) -> str:
    name = reference[1:].removeprefix("{").removesuffix("}")
    parameter = None if reference[0] == "`" or name.startswith("(") else _PARAMETER.fullmatch(name)
    if parameter is None:
        return Unset(reference, "$(...)" if reference == "$(" else reference)
    name, _, colon, operator, word = parameter.groups()
    value = known.get(name)
    is_set = value is not None and (not colon or value != [""])
    if operator == "+":
        return substituted(word, known) if is_set else ""
    if operator in ("-", "=") and not is_set:
        return substituted(word.strip("\"'"), known)
    if value is None:
        return Unset(reference, reference)
    return value[0] if len(value) == 1 else " ".join(value)


def _joined(text: str, known: Known) -> str:
    """Return the word without quotes and with its references replaced, not split at blanks."""
    return _concat(part for piece in _PIECE.findall(text) for part in _parts(piece, known))


def _parts(piece: str, known: Known) -> Iterator[str]:
    if piece[0] == "'":
        yield piece[1:-1]
    elif piece[0] == "\\":
        yield piece[1:].strip("\n")
    elif piece[0] == '"':
        for part in re.split(r"(\\.)", piece[1:-1], flags=re.S):
            is_escape = part[:1] == "\\" and part[1:] in ('"', "\\", "$", "`", "\n")
            yield part[1:].strip("\n") if is_escape else substituted(part, known)
    else:
        yield substituted(piece, known)


def _concat(parts: Iterable[str]) -> str:
    """Concatenate the parts of a word; `Unset` if one of them is."""
    parts = list(parts)
    text = "".join(parts)
    missing = [part.missing for part in parts if isinstance(part, Unset)]
    return Unset(text, " ".join(missing)) if missing else text


def _expanded(text: str, known: Known) -> list[str]:
    """Return the words that a word expands to: several for an array, or for a reference without quotes."""
    if (array := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', text)) and array[1] in known:
        return known[array[1]]
    if re.fullmatch(rf"\$(?:\w+|{_BRACED})", text):
        if given := re.fullmatch(r"\$\{(\w+):?\+(.*)\}", text, re.S):  # ${NAME:+words}
            is_set = known.get(given[1], [""]) != [""]
            inner = (match for match in _TOKEN.finditer(given[2]) if is_set and match.lastgroup == "word")
            return [word for match in inner for word in _expanded(match[0], known)]
        value = _value(text, known)
        return [value] if isinstance(value, Unset) else value.split()
    return [_joined(text, known)]
