"""What is wrong with, or worth saying about, one configuration file; collected so that all of it is shown at
once."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import ConfigError


@dataclass
class Findings:
    """Problems are full sentences that begin with `file:line: key` and say what to do; notes are shown once
    at start."""

    path: Path
    notes: list[str] = field(default_factory=list)
    _problems: dict[tuple[int, str], str] = field(default_factory=dict)

    def problem(self, line: int, key: str, text: str) -> None:
        """One per key: what follows from a first mistake only hides it."""
        place = f"{self.path}:{line}" if line else f"{self.path}"
        self._problems.setdefault((line, key), f"{place}: {key} {text}" if key else f"{place}: {text}")

    def outside(self, where: str, text: str) -> None:
        """A problem that is not in the file, as in an environment variable."""
        self._problems.setdefault((0, where), f"{where} {text}")

    def note(self, line: int, text: str) -> None:
        note = f"{self.path}:{line}: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def raise_if_any(self) -> None:
        if self._problems:
            raise ConfigError(
                [text for _, text in sorted(self._problems.items(), key=lambda item: item[0][0])]
            )


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was probably meant to be."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def or_nearest(name: str, valid: Iterable[str], otherwise: str) -> str:
    found = nearest(name, valid)
    return f"did you mean {found}?" if found else otherwise
