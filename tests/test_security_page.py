"""docs/security.md states the limits of the configuration, and every page names only tests that exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.config.sections import rules

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/security.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
SOURCES = "".join(TESTS.values())


def limits() -> Iterator[tuple[str, str, Any]]:
    """Yield, for each key of a limit, the default on the page, the key, and the default in the configuration."""
    table = PAGE.split("## Limits")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (?!limit|-)(.+) \|$", table, re.M):
        _, said, keys, _, test = (cell.strip() for cell in row.split("|"))
        assert test, f"{row} has no test"
        for key in re.findall(r"`([\w.-]+)`", keys):
            section, _, name = key.rpartition(".")
            yield said, key, rules(section or "Frontend")[name]["default"]


def _words(default: float) -> set[str]:
    return {
        f"{default:,.0f}",
        f"{default:,.0f} s",
        f"{default / 3600:g} hour",
        f"{default / (1 << 20):g} MiB",
    }


@pytest.mark.parametrize(("said", "key", "default"), list(limits()), ids=lambda value: str(value))
def test_a_limit_is_what_the_configuration_says(said: str, key: str, default: float) -> None:
    assert set(re.split("; |, at most |, ", said)) & _words(default), f"{key} is {default:g}"


def test_the_tests_that_pages_name_exist() -> None:
    """A page names files, with or without their folder (`stream/test_tls.py`), and functions."""
    missing = [(page.name, name) for page in PAGES for name in _tests(page.read_text()) if not _exists(name)]
    assert missing == []
    assert len(set(_tests(PAGE))) > 20


def _tests(text: str) -> list[str]:
    return re.findall(r"[\w/]*\btest_\w+(?:\.py)?", text)


def _exists(name: str) -> bool:
    if name.endswith(".py"):
        return any(f"/{path}".endswith(f"/{name}") for path in TESTS)
    return f"def {name}(" in SOURCES


@pytest.mark.parametrize("key", [key for key in rules("Security") if key != "allow"])
def test_each_key_of_the_section_is_explained(key: str) -> None:
    assert key in PAGE
