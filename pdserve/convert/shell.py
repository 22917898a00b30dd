"""Splits a shell script into the words of its commands, with the values of the variables that it sets itself.

Quotes, comments, continued lines, arrays, `${NAME:-default}` and scripts inside (`bash -c`) are read as a shell reads
them; conditions and loops are not run. A word with a value that the script does not have is `Unset`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.util.errors import ConfigError

MOST_TEXT = 100_000
"""characters or words in a variable"""


def _nested(left: str, right: str) -> str:
    """Four levels of brackets. Possessive, so that text without an end costs no more than its length."""
    run, inside = rf"[^{left}{right}]{{1,4000}}+", "(?!)"
    for _ in range(4):
        inside = rf"\{left}(?:{run}|{inside}){{0,99}}+\{right}"
    return inside


_BRACED, _COMMAND = _nested("{", "}"), _nested("(", ")")
_PLACEHOLDER = "<[A-Za-z][^<>|&;\n]*>"
"""in a manual, a value to fill in"""
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
_REFERENCE = re.compile(rf"\$(?:[A-Za-z_]\w*|{_BRACED}|{_COMMAND}|[\d@*\#?!(])|`[^`]*`", re.S)
_PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.S)
_BEFORE_ASSIGNMENT = {
    "export",
    "local",
    "readonly",
    "declare",
    "env",
    "if",
    "then",
    "else",
    "do",
    "{",
    "-a",
    "-x",
}
Known = dict[str, list[str]]
"""the words of each variable; of one that is no array, a single one"""


class Unset(str):
    """A word with references to values that the script does not have; `missing`: the references."""

    missing: str

    def __new__(cls, text: str, missing: str) -> "Unset":
        word = super().__new__(cls, text)
        word.missing = missing
        return word


def commands_of(script: str, variables: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """The words of each command. An array that no command uses counts as a command."""
    known: Known = {name: [value] for name, value in (variables or {}).items()}
    words, array, is_target = list[str](), "", False
    unused = dict[str, list[str]]()
    for match in _TOKEN.finditer(script + "\n"):
        kind, text = match.lastgroup, match[0]
        if kind == "word" and is_target:
            is_target = False
        elif kind == "word":
            text = text.removeprefix("ExecStart=")  # in a unit of systemd
            assigned = None if array else re.match(r"([A-Za-z_]\w*)(\+?)=", text)
            if assigned and _BEFORE_ASSIGNMENT.issuperset(words):
                value = _joined(text[assigned.end() :], known)
                value = _added("".join(known.get(assigned[1], [])), value) if assigned[2] else value
                if assigned[1] not in known or not isinstance(value, Unset):  # a default stays
                    known[assigned[1]] = _bounded([value])
            else:
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


def _bounded(words: list[str]) -> list[str]:
    if sum(map(len, words)) + len(words) > MOST_TEXT:
        raise ConfigError(
            [f"a variable grows beyond {MOST_TEXT:,} characters: give the command of vLLM alone."]
        )
    return words


def script_in(words: Sequence[str], known: Known) -> Iterator[list[str]]:
    """The commands of the script that these words give to a shell, or the words themselves."""
    shells = [at for at, word in enumerate(words) if Path(word).name in ("sh", "bash", "zsh", "dash")]
    for at, word in enumerate(words[:-1]):
        if shells and at > shells[0] and re.fullmatch("-[eiluxo]*c", word):
            script = next((each for each in words[at + 1 :] if each != "--"), "")
            yield from commands_of(script, {name: value[0] for name, value in known.items() if value})
            return
    if words:
        yield list(words)


def substituted(text: str, known: Known) -> str:
    """The text with the values of its references; Unset if one has none."""
    missing = list[str]()

    def value(match: re.Match[str]) -> str:
        found = _value(match[0], known)
        if isinstance(found, Unset):
            missing.append(found.missing)
        return found

    result = _REFERENCE.sub(value, text)
    return Unset(result, " ".join(missing)) if missing else result


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
    """A word without its quotes, as one word."""
    word = ""
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece[0] == "'":
            word = _added(word, piece[1:-1])
        elif piece[0] == "\\":
            word = _added(word, piece[1:].strip("\n"))
        elif piece[0] == '"':
            for part in re.split(r"(\\.)", piece[1:-1], flags=re.S):
                is_escape = part[:1] == "\\" and part[1:] in ('"', "\\", "$", "`", "\n")
                word = _added(word, part[1:].strip("\n") if is_escape else substituted(part, known))
        else:
            word = _added(word, substituted(piece, known))
    return word


def _added(one: str, other: str) -> str:
    missing = [each.missing for each in (one, other) if isinstance(each, Unset)]
    return Unset(str(one) + str(other), " ".join(missing)) if missing else one + other


def _expanded(text: str, known: Known) -> list[str]:
    """The words of a word: those of an array, and of a reference without quotes."""
    if (array := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', text)) and array[1] in known:
        return known[array[1]]
    if re.fullmatch(rf"\$(?:\w+|{_BRACED})", text):
        if given := re.fullmatch(r"\$\{(\w+):?\+(.*)\}", text, re.S):  # may have several words, with quotes
            is_set = known.get(given[1], [""]) != [""]
            inner = (match for match in _TOKEN.finditer(given[2]) if is_set and match.lastgroup == "word")
            return [word for match in inner for word in _expanded(match[0], known)]
        value = _value(text, known)
        return [value] if isinstance(value, Unset) else value.split()
    return [_joined(text, known)]
