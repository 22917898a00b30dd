"""Parses a YAML file into entries that know their lines, and collects the file's problems, so that all are reported at
once with their places."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import yaml

from pdserve.config.schema import kebab
from pdserve.util.errors import ConfigError
from pdserve.util.program import pdserve_command

MAX_ALIASED = 100_000
"""Maximum of values that aliases (`*name`) may add to a file."""


@dataclass(frozen=True)
class Entry:
    """A key with its value."""

    path: str
    """`Section.key`, as written, or an environment variable"""
    line: int
    """0: not in the file"""
    value: object = None
    """plain Python; keys of a mapping are as written"""
    children: Mapping[str, "Entry"] = field(default_factory=dict)
    """a mapping's entries, with keys in kebab-case (`served_model_name` is `served-model-name`)"""

    @property
    def section(self) -> str:
        return self.path.split(".", 1)[0]


@dataclass
class Findings:
    """Problems and notes of a file. A problem is a sentence that begins with `file:line: key` and says what to do.
    Notes are shown once at start."""

    path: Path
    notes: list[str] = field(default_factory=list)
    _problems: dict[tuple[int, str], str] = field(default_factory=dict)

    def problem(self, entry: Entry, text: str) -> None:
        """Add a problem. Only a key's first problem is kept, because others often follow from it."""
        place = f"{self.path}:{entry.line}: {entry.path}".removesuffix(" ") if entry.line else entry.path
        self._problems.setdefault((entry.line, entry.path), f"{place} {text}")

    def problem_without_line(self, text: str, subject: str = "") -> None:
        """Add a problem of the whole file, or of a subject outside, such as an environment variable."""
        self._problems.setdefault((0, subject), f"{subject} {text}" if subject else f"{self.path}: {text}")

    def note(self, entry: Entry, text: str) -> None:
        note = f"{self.path}:{entry.line}: {entry.path}{text}"
        if note not in self.notes:
            self.notes.append(note)

    def raise_if_any(self) -> None:
        """Raise a ConfigError with the problems in order of their lines, if there are any."""
        if self._problems:
            places = sorted(self._problems, key=lambda place: place[0])
            raise ConfigError([self._problems[place] for place in places])


_OPPOSITES = (
    {"enable", "disable"},
    {"allow", "disallow"},
    {"min", "max"},
    {"local", "remote"},
    {"cpu", "gpu"},
)


def did_you_mean(name: str, valid: Iterable[str], otherwise: str) -> str:
    """Return `did you mean …?` for one to three valid names that begin with `name`, else for the valid name that it
    misspells. If there is none, return `otherwise`."""
    names = list(valid)
    longer = [each for each in names if re.match(re.escape(name) + r"[-_]", each, re.IGNORECASE)]
    if 1 <= len(longer) <= 3:
        return f"did you mean {' or '.join(longer)}?"
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    likely = next((each for each in nearest if _misspells(name, each)), None)
    return f"did you mean {likely}?" if likely else otherwise


def _misspells(name: str, valid: str) -> bool:
    """Whether `name` has each word of `valid`, perhaps misspelt, and no opposite of one."""
    written, meant = ({word.lower() for word in re.findall(r"[A-Za-z0-9]+", each)} for each in (name, valid))
    for pair in _OPPOSITES:
        if written & pair and written & pair != meant & pair:
            return False
    whole = "".join(sorted(written - meant))
    return all(difflib.get_close_matches(word, [*written, whole], cutoff=0.7) for word in meant - written)


def read_tree(path: Path, findings: Findings) -> Mapping[str, Entry]:
    """Return the file's top-level entries. Raises ConfigError if the file is not one YAML mapping; other problems, such
    as duplicate keys, go to `findings`."""
    advice = "give the path of a YAML file with -f"
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([f"{path} cannot be read ({reason}): {advice}."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} is not UTF-8 text: {advice}."]) from error
    return parse_tree(text, findings, f"`{pdserve_command('init graph.yaml')}` writes one to start from")


def parse_tree(text: str, findings: Findings, advice: str) -> Mapping[str, Entry]:
    """Like `read_tree`, but for a text. `advice` says what to do if the text is not a mapping."""
    path = findings.path
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError([f"{path} is empty: {advice}."])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([f"{path}:1: the file is not a mapping of sections: {advice}."])
        _bound_aliases(path, node, {})
        return _Reader(findings).children("", node, ())
    except yaml.YAMLError as error:
        raise ConfigError([_not_yaml(path, error)]) from error
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply: {advice}."]) from None


def _bound_aliases(path: Path, node: yaml.Node, seen: dict[yaml.Node, int]) -> int:
    """Return how many nodes a node has with its aliases written out. `seen`: the sizes of earlier nodes. Raises
    ConfigError if it is too large: 30 levels that each name the level before twice make a billion nodes."""
    if node in seen:
        return seen[node]
    seen[node] = 1  # an alias inside may name this node
    parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
    if not isinstance(node, yaml.ScalarNode):
        seen[node] += sum(_bound_aliases(path, part, seen) for part in parts)
    if seen[node] > len(seen) + MAX_ALIASED:
        text = f"aliases make more than {MAX_ALIASED:,} values of this: write fewer of them."
        raise ConfigError([f"{path}:{node.start_mark.line + 1}: {text}"])
    return seen[node]


def read_documents(text: str, path: Path) -> list[object]:
    """Return all documents of another tool's YAML file, as plain values. Raises ConfigError."""
    try:
        loader, documents = yaml.SafeLoader(text), []
        while loader.check_node():
            if (node := loader.get_node()) is not None:
                _bound_aliases(path, node, {})
                documents.append(loader.construct_document(node))
        return documents
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([_not_yaml(path, error)]) from error
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply."]) from None


def _not_yaml(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark else f"{path}"
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return f"{place}: this is not YAML ({said}): correct the line, its indentation or its quotes."


class _Constructor(yaml.constructor.SafeConstructor):
    """Refuses whole numbers that begin with 0, which are octal in YAML 1.1. Reads dates also after lm-format-enforcer,
    which vLLM imports, has removed them from PyYAML's own table."""

    def number(self, node: yaml.ScalarNode) -> int:
        if re.match(r"[-+]?0[\d_]", node.value):
            raise ValueError(f"{node.value} begins with 0")
        return int(self.construct_yaml_int(node))

    yaml_constructors: ClassVar = yaml.constructor.SafeConstructor.yaml_constructors | {
        "tag:yaml.org,2002:timestamp": yaml.constructor.SafeConstructor.construct_yaml_timestamp,
        "tag:yaml.org,2002:int": number,
    }


class _Reader:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._construct = _Constructor()

    def children(self, path: str, node: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> dict[str, Entry]:
        """Return the entries of a mapping. `above`: the mappings around it; aliases to them would be endless."""
        self._find_duplicates(path, node)
        self._construct.flatten_mapping(node)  # `<<: *defaults`: the mapping's own keys win
        entries = {}
        for key_node, value_node in node.value:
            entry = self._entry(path, key_node, value_node, (*above, node))
            if entry is not None:
                entries[kebab(key_node.value)] = entry
        return entries

    def _entry(
        self, path: str, key_node: yaml.Node, node: yaml.Node, above: tuple[yaml.Node, ...]
    ) -> Entry | None:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
            text = "has a key that is not a word: put quotes round it or remove it."
            self._findings.problem(Entry(path, line), text)
            return None
        entry = Entry(_inside(path, key_node), line)
        if any(node is outer for outer in above):
            self._findings.problem(entry, "is an alias to a mapping that contains it: write the value out.")
            return None
        children = self.children(entry.path, node, above) if isinstance(node, yaml.MappingNode) else {}
        try:
            return replace(entry, value=self._construct.construct_object(node, deep=True), children=children)
        except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
            # a mapping without all its children has a key that is reported already
            if not isinstance(node, yaml.MappingNode) or len(children) == len(node.value):
                said = getattr(error, "problem", None) or error
                self._findings.problem(
                    entry, f"has no valid value ({said}): correct it, or quote it if it is text."
                )
            return None

    def _find_duplicates(self, path: str, node: yaml.MappingNode) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line, name = key_node.start_mark.line + 1, kebab(str(key_node.value))
            if name in seen:
                text = f"was already set in line {seen[name]}: keep one of the two."
                self._findings.problem(Entry(_inside(path, key_node), line), text)
            seen.setdefault(name, line)


def _inside(path: str, key_node: yaml.Node) -> str:
    return f"{path}.{key_node.value}" if path else str(key_node.value)
