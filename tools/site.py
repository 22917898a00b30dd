"""MkDocs hooks for the site (`mkdocs.yml`). They add README.md as the first page, one page with the `--help` of all
commands, and a list of the decisions. A link to a file that is not a page of the site becomes the file's name."""

import io
import os
import re
from contextlib import redirect_stdout
from os.path import normpath
from pathlib import Path

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
    """Return the help of each command. Commands of one function, such as the roles, share a section."""
    names: dict[str, list[str]] = {}
    for name, (what, _) in COMMANDS.items():
        for inner, (function, _) in what.items() if isinstance(what, dict) else [("", (what, ""))]:
            names.setdefault(str(function), []).append(f"{name} {inner}".strip())
    shown = [f"## {', '.join(commands)}\n\n{_help(commands[0])}" for commands in names.values()]
    return "\n\n".join(["# Commands", _help(""), *shown])


def _help(command: str) -> str:
    os.environ["COLUMNS"] = "112"
    with redirect_stdout(io.StringIO()) as shown:
        main([*command.split(), "--help"])
    return f"```\n{shown.getvalue()}```"


def _decisions() -> str:
    rows = (
        f"- [{path.read_text().splitlines()[0][2:]}](decisions/{path.name})"
        for path in sorted((ROOT / "docs/decisions").glob("*.md"))
    )
    return "\n".join(["# Decisions", "", "What was decided, and why.", "", *rows])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config
    folder = Path(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        place = target.partition("#")[0]
        if not place or files.get_file_from_path(normpath(folder / place)) is not None:
            return found[0]
        if normpath(folder / place) == "decisions":
            return f"[{text}]({'../' * len(folder.parts)}decisions.md)"
        name = normpath(Path("docs") / folder / place)
        return f"`{name}`" if text.removesuffix(".py") in name else f"{text} (`{name}`)"

    return _LINK.sub(link, markdown)
