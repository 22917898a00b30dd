"""Reports what a release of vLLM changes for pdserve: `python -m tools.vllm_diff OLD NEW`.

OLD and NEW are wheels (`pip download --no-deps vllm==0.33.0`), folders that hold `vllm/`, or `installed`. Nothing is
installed or imported, because the sources are compared as syntax trees. The report has
- names that pdserve imports and that are gone, with the modules that define them now,
- changed fields, parameters and source texts among those that `vllm_surface.py` lists,
- changed bodies of members that pdserve overrides, replaces or inherits.

Exit code: 0 for no change, 1 for changes, 2 if OLD or NEW cannot be read.
"""

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tools.vllm_surface import CALLED, FIELDS, FUNCTIONS, MESSAGES, REPLACED, SOURCES

PACKAGE = Path(__file__).parent.parent / "pdserve"
CORE_CALLER, CORE_CALL = "vllm.v1.engine.async_llm", re.compile(r"self\.engine_core\.(\w+)")
"""Calls of vLLM's frontend to its engine core. pdserve's engine client must have these methods."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Release:
    """The sources of a vLLM release. The constructor raises OSError or BadZipFile if it cannot read them."""

    def __init__(self, place: str) -> None:
        self.name = Path(place).name
        path = Path(place)
        if place == "installed":
            spec = find_spec("vllm")
            if spec is None or spec.origin is None:
                raise FileNotFoundError("no vLLM is installed here")
            path = Path(spec.origin).parent.parent
        self._read, self.files = _wheel(path) if path.is_file() else _folder(path)
        if "vllm/__init__.py" not in self.files:
            raise FileNotFoundError(f"{place} holds no vllm/")

    def source(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        file = next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self.files), None)
        return None if file is None else self._read(file)

    @cache  # noqa: B019  # both releases live as long as the program
    def tree(self, module: str) -> ast.Module | None:
        source = self.source(module)
        return None if source is None else ast.parse(source)

    def find(self, dotted: str) -> tuple[str, ast.AST] | None:
        """Return the module and node that define a dotted name: of a module, a name in a module, or a class's
        member."""
        owner, _, name = dotted.rpartition(".")
        if (module := self.tree(dotted)) is not None:
            return dotted, module
        if (module := self.tree(owner)) is not None:
            return self._name(owner, module, name)
        holder = self.find(owner) if owner else None
        return self._member(*holder, name) if holder else None

    def _name(self, module: str, tree: ast.Module, name: str) -> tuple[str, ast.AST] | None:
        """Find a name at a module's top level, also an imported one."""
        for node in _statements(tree.body):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return module, node
                case ast.Assign() | ast.AnnAssign() if name in _assigned(node):
                    return module, node
                case ast.ImportFrom():
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            return self.find(f"{self._absolute(module, node)}.{alias.name}") or (module, node)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        package = f"{'/'.join(parts)}/__init__.py" in self.files
        parts = parts[: len(parts) - node.level + package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _member(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in owner.body:
            if isinstance(node, Function) and node.name == name:
                return module, node
        for base in owner.bases:
            holder = self.find(f"{module}.{ast.unparse(base).partition('[')[0]}")
            if holder and (found := self._member(*holder, name)):
                return found
        return None

    def fields(self, dotted: str) -> list[str]:
        found = self.find(dotted)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        bases = [f"{found[0]}.{ast.unparse(base)}" for base in found[1].bases]
        inherited = [field for base in bases for field in self.fields(base)]
        own = [
            node.target.id
            for node in found[1].body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if not ast.unparse(node.annotation).startswith("ClassVar")
        ]
        return list(dict.fromkeys(inherited + own))

    def parameters(self, dotted: str) -> list[str] | None:
        found = self.find(dotted)
        if found is None or not isinstance(found[1], Function):
            return None
        given = found[1].args
        every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [argument.arg for argument in every if argument is not None]

    def defining(self, name: str) -> list[str]:
        """Return the modules that define a class or function of this name."""
        starts = tuple(f"{word} {name}{end}" for word in ("class", "def", "async def") for end in "(:")
        files = (file for file in sorted(self.files) if any(s in self._read(file) for s in starts))
        return [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files]


def _wheel(path: Path) -> tuple[Callable[[str], str], set[str]]:
    archive = zipfile.ZipFile(path)
    files = {name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")}
    return cache(lambda file: archive.read(file).decode()), files


def _folder(path: Path) -> tuple[Callable[[str], str], set[str]]:
    files = {file.relative_to(path).as_posix() for file in (path / "vllm").rglob("*.py")}
    return cache(lambda file: (path / file).read_text()), files


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, also those under `if` and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(getattr(node, part, []))


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def imports(*folders: Path) -> list[str]:
    """Return the dotted names that sources in `folders` (default: pdserve) import from vLLM."""
    files = (file for folder in folders or (PACKAGE,) for file in folder.rglob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return sorted(
        {
            f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
    )


def members(release: Release, package: Path = PACKAGE) -> tuple[list[str], list[str]]:
    """Return the members of vLLM classes that the package's subclasses override, and those that they only use."""
    known = {name.rpartition(".")[2]: name for name in imports(package)}
    trees = [ast.parse(file.read_text()) for file in package.rglob("*.py")]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    overridden, used = set[str](), set[str]()

    def origins(node: ast.ClassDef) -> Iterator[str]:
        for base in map(ast.unparse, node.bases):
            if base in known:
                yield known[base]
            elif base in classes:
                yield from origins(classes[base])

    for node in classes.values():
        own = {method.name for method in node.body if isinstance(method, Function)}
        for origin in origins(node):
            overridden |= {f"{origin}.{name}" for name in own}
            used |= {f"{origin}.{name}" for name in _of_self(node) - own}
    return [name for name in sorted(overridden) if release.find(name)], [
        name for name in sorted(used) if release.find(name)
    ]


def _of_self(node: ast.ClassDef) -> set[str]:
    attributes = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    return {part.attr for part in attributes if ast.unparse(part.value) in ("self", "super()")}


def compare(old: Release, new: Release, package: Path = PACKAGE, *more: Path) -> Iterator[str]:
    """Yield each change as a text of one or more lines. `more`: other folders with imports of vLLM."""
    yield from _imports(old, new, package, *more)
    yield from _signatures(old, new)
    yield from _texts(old, new)
    yield from _bodies(old, new, package)


def _imports(old: Release, new: Release, *folders: Path) -> Iterator[str]:
    for name in imports(*folders):
        if old.find(name) and not new.find(name):
            places = ", ".join(new.defining(name.rpartition(".")[2])) or "nowhere"
            yield f"import gone: {name} (the name is defined in: {places})"


def _signatures(old: Release, new: Release) -> Iterator[str]:
    for name, fields in (MESSAGES | FIELDS).items():
        was, now = old.fields(name), new.fields(name)
        gone = [field for field in was if field not in now and (name in MESSAGES or field in fields.split())]
        added = [field for field in now if field not in was and name in MESSAGES]
        if gone or added:
            yield f"fields of {name}: gone {gone}, new {added}"
    for name in FUNCTIONS | CALLED:
        if old.parameters(name) != new.parameters(name):
            yield f"parameters of {name}: {old.parameters(name)} -> {new.parameters(name)}"


def _texts(old: Release, new: Release) -> Iterator[str]:
    for module, texts in SOURCES.items():
        for text in texts:
            if text in (old.source(module) or "") and text not in (new.source(module) or ""):
                yield f"text gone from {module}: {text}"
    called, calls = (set(CORE_CALL.findall(release.source(CORE_CALLER) or "")) for release in (old, new))
    if called != calls:
        yield f"AsyncLLM's calls of its engine core: gone {sorted(called - calls)}, new {sorted(calls - called)}"


def _bodies(old: Release, new: Release, package: Path) -> Iterator[str]:
    overridden, inherited = members(old, package)
    for name in sorted({*overridden, *REPLACED}):
        if change := _body(name, old, new):
            yield change
    for name in inherited:
        if change := _body(name, old, new):
            yield change.partition("\n")[0].rstrip(":") + ", used as it is"


def _body(name: str, old: Release, new: Release) -> str:
    """Return the change of a member's body; empty if there is none."""
    was, now = old.find(name), new.find(name)
    if was is None or now is None:
        return f"member {'gone' if was else 'new'}: {name}" if was or now else ""
    before, after = ast.unparse(was[1]).splitlines(), ast.unparse(now[1]).splitlines()
    if before == after:
        return ""
    lines = unified_diff(before, after, f"{old.name}: {was[0]}", f"{new.name}: {now[0]}", lineterm="", n=2)
    return "\n".join([f"body of {name}:", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.vllm_diff", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for place in ("old", "new"):
        parser.add_argument(place, metavar=place.upper(), help="a wheel, a folder with vllm/, or 'installed'")
    options = parser.parse_args()
    try:
        old, new = Release(options.old), Release(options.new)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"cannot be read: {error}", file=sys.stderr)
        return 2
    root = PACKAGE.parent
    changes = list(compare(old, new, PACKAGE, *(root / name for name in ("benchmarks", "tests", "tools"))))
    print(*changes, f"{len(changes)} changes between {old.name} and {new.name}", sep="\n\n")
    return bool(changes)


if __name__ == "__main__":
    sys.exit(main())
