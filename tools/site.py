"""MkDocs' hooks for the site (`mkdocs.yml`): README.md is its first page, the commands' page is their `--help`, the
decisions get a list, and links to files of the repository that are no pages become their names."""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pdserve.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)+)\]\(([^)\s:]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = (
        (ROOT / "README.md").read_text().replace("](docs/", "](").replace("](decisions/)", "](decisions.md)")
    )
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "decisions.md", content=_decisions()))
    files.append(File.generated(config, "commands.md", content=_commands()))
    return files


def _commands() -> str:
    """The help of each command; those of one function, as the roles are, have it once."""
    functions: dict[str, list[str]] = {}
    for command, function in _functions(COMMANDS):
        functions.setdefault(function, []).append(command)
    shown = [f"## {', '.join(commands)}\n\n```\n{_help(commands[0])}```" for commands in functions.values()]
    return "\n\n".join(["# Commands", f"```\n{_help('')}```", *shown])


def _functions(commands: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    for name, (what, _) in commands.items():
        if isinstance(what, str):
            yield f"{group}{name}", what
        else:
            yield from _functions(what, f"{name} ")


def _help(command: str) -> str:
    os.environ["COLUMNS"] = "112"
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([*command.split(), "--help"])
    return shown.getvalue()


def _decisions() -> str:
    rows = (
        f"- [{_title(path)}](decisions/{path.name})"
        for path in sorted((ROOT / "docs/decisions").glob("*.md"))
    )
    return "\n".join(["# Decisions", "", "What was decided, and why.", "", *rows])


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config
    folder = Path(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        place = target.partition("#")[0]
        if not place or files.get_file_from_path(_normal(folder / place)) is not None:
            return found[0]
        if _normal(folder / place) == "decisions":
            return f"[{text}]({'../' * len(folder.parts)}decisions.md)"
        name = _normal(Path("docs") / folder / place)
        return f"`{name}`" if text.removesuffix(".py") in name else f"{text} (`{name}`)"

    return _LINK.sub(link, markdown)


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
