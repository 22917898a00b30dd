"""The repository's rules that a test can check."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pdserve.cli import COMMANDS

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "pdserve").rglob("*.py"))
BENCH = sorted((ROOT / "benchmarks").rglob("*.py"))

ALLOWED = {
    "aetcd": ("registry/etcd_session.py",),
    "grpc": ("registry/etcd_session.py",),
    "nats": ("queue/jetstream/",),
    "zmq": ("engine/vllm/cache.py", "kv/side_channel.py"),  # vLLM itself uses ZeroMQ there
    "pynvml": ("plan/machine.py",),
    "yaml": ("config/files/yaml_tree.py",),
    "pydantic": ("config/",),
    "cryptography": ("security/",),
    "vllm": (
        "engine/vllm/api.py",
        "engine/vllm/worker.py",
        "engine/vllm/cpu_faults.py",
        "frontend/vllm/",
        "kv/",
    ),
    "fastapi": ("frontend/vllm/",),
    "starlette": ("frontend/",),
    "uvicorn": ("frontend/",),
    "torch": ("engine/vllm/cpu_faults.py", "engine/vllm/idle_cores.py", "kv/"),
    "opentelemetry": ("observe/otlp.py", "observe/tracing.py"),
    "requests": ("observe/otlp.py",),
    "sqlite3": ("frontend/batches/store.py",),
    "rich": ("cli/", "observe/tables.py", "plan/render.py"),
    "typer": ("cli/",),
}
"""Outside library -> the only files and folders of the package that may import it."""

UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
MAY_PRINT = ("cli/",)
"""Folders whose files may print."""


def name(path: Path) -> str:
    return path.relative_to(ROOT / "pdserve").as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level names of all that the file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return frozenset(found)


@pytest.mark.parametrize("library", ALLOWED)
def test_an_outside_library_is_imported_only_in_its_places(library: str) -> None:
    importers = [name(path) for path in SOURCES if library in imports(path)]
    assert [each for each in importers if not each.startswith(ALLOWED[library])] == []


LEAVES = ("__init__", "demo", "util", "contract", "security")
"""Rooms that every room may import from. A leaf imports only from leaves before it."""

ARROWS = {
    "config": "",
    "convert": "config",
    "install": "",
    "kv": "",
    "observe": "",
    "runtime": "observe",
    "queue": "runtime",
    "registry": "runtime",
    "stream": "runtime",
    "plan": "config observe",
    "engine": "config kv runtime",
    "process": "config plan engine queue registry stream observe runtime",
    "decode": "process config engine kv queue registry stream observe runtime",
    "prefill": "process config engine queue registry observe runtime",
    "both": "decode prefill config engine registry runtime",
    "frontend/admission": "config",
    "frontend/edge": "frontend/admission observe runtime",
    "frontend/keys": "frontend/admission frontend/edge config observe",
    "frontend/vllm": "frontend/edge registry runtime",
    "frontend/sequence": "frontend/admission frontend/edge frontend/vllm observe",
    "frontend/workers": "frontend/admission frontend/sequence observe runtime stream",
    "frontend/model": "frontend/admission frontend/edge frontend/sequence frontend/vllm frontend/workers config "
    "registry runtime observe stream",
    "frontend": "frontend/admission frontend/edge frontend/keys frontend/model frontend/vllm process config plan "
    "registry stream observe runtime",
    "frontend/batches": "frontend frontend/edge frontend/keys observe runtime",
    "frontend/observability": "frontend frontend/edge frontend/keys config observe",
    "supervisor": "process config plan queue registry observe runtime",
    "cli": "install convert supervisor process config plan queue registry observe",
    "__main__": "cli",
}
"""Room -> the rooms that it may import from, besides the leaves. Other imports are forbidden; adding one is a design
decision. Imports by a string (lazily loaded implementations, the roles' services) do not count."""


def room(path: Path) -> str:
    """Return the file's room: a folder of the package, a folder inside `frontend/`, or the name of a file beside these
    folders."""
    parts = path.relative_to(ROOT / "pdserve").with_suffix("").parts
    return "/".join(parts[:2]) if parts[0] == "frontend" and len(parts) > 2 else parts[0]


def imported_rooms(path: Path) -> Iterator[str]:
    yield from map(room, imported_files(path))


def imported_files(path: Path) -> Iterator[Path]:
    """The files of the package that the file imports from, also inside functions or for types only."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            package, *parts = module.split(".")
            if package == "pdserve":
                yield _source(ROOT / "pdserve", parts)


def _source(folder: Path, parts: list[str]) -> Path:
    """Return the file of a dotted name, which may end with a name defined in the file."""
    while parts and not folder.joinpath(*parts).with_suffix(".py").exists():
        if folder.joinpath(*parts, "__init__.py").exists():
            return folder.joinpath(*parts, "__init__.py")
        parts = parts[:-1]
    return folder.joinpath(*parts).with_suffix(".py") if parts else folder / "__init__.py"


def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        found.setdefault(room(path), set()).update(imported_rooms(path))
    return {source: targets - {source} for source, targets in found.items()}


def test_rooms_import_what_the_table_says() -> None:
    found = {source: targets - set(LEAVES) for source, targets in arrows().items() if source not in LEAVES}
    assert found == {source: set(targets.split()) for source, targets in ARROWS.items()}


def test_a_room_has_at_most_ten_files() -> None:
    sizes = Counter(path.parent for path in SOURCES if not path.name.startswith("__"))
    assert {name(folder): size for folder, size in sizes.items() if size > 10} == {}


def test_leaves_import_only_leaves_before_them() -> None:
    found = arrows()
    assert {leaf: found[leaf] - set(LEAVES[:place]) for place, leaf in enumerate(LEAVES)} == {
        leaf: set() for leaf in LEAVES
    }


def test_arrows_between_rooms_go_one_way() -> None:
    """Raises CycleError, which names the cycle."""
    assert set(TopologicalSorter(arrows()).static_order()) >= set(ARROWS)


def test_imports_between_files_go_one_way() -> None:
    """Raises CycleError, which names the cycle."""
    files = {name(path): {name(found) for found in imported_files(path)} - {name(path)} for path in SOURCES}
    assert len(list(TopologicalSorter(files).static_order())) == len(SOURCES)


def test_a_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in (*SOURCES, *BENCH):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_private_vocabulary() -> None:
    """Requests, workers and processes are no persons, and `one` is no name for them."""
    person = re.compile(r"(?<!\")\b(who|whoever|nobody|everybody)\b|\bfor one in\b", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*SOURCES, *BENCH)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if person.search(line)
    ]
    assert found == []


def test_nothing_is_pickled() -> None:
    assert [name(path) for path in SOURCES if UNSAFE & imports(path)] == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


_NOW = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "ctime"),
    ("time", "gmtime"),
    ("time", "localtime"),
} | {(kind, name) for kind in ("datetime", "date") for name in ("now", "utcnow", "today")}


def reads_the_time_of_day(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield f"{name(path)}:{node.lineno}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, call = ast.unparse(node.func.value).rpartition(".")[2], node.func.attr
        given = len(node.args) - (call == "strftime")
        if ((owner, call) in _NOW or (owner, call) == ("time", "strftime")) and given < 1:
            yield f"{name(path)}:{node.lineno}"


def test_the_time_of_day_is_read_in_one_place() -> None:
    """The clocks of hosts differ, and may be set at any time: see `pdserve/util/clock.py`."""
    found = [
        place for path in SOURCES if name(path) != "util/clock.py" for place in reads_the_time_of_day(path)
    ]
    assert found == []


def test_no_process_leaves_the_session() -> None:
    """Most Linux hosts schedule each session as a group, which made TTFTs ten times longer."""
    leaving = re.compile(r"start_new_session\s*=\s*True|os\.setsid\(")
    assert [name(path) for path in SOURCES if leaving.search(path.read_text())] == []


AWAITED_TASKS = {
    "engine/vllm/process.py": 1,
    "frontend/model/run.py": 2,
    "queue/jetstream/connection.py": 2,
    "registry/etcd_session.py": 3,
    "supervisor/processes/child.py": 1,
    "supervisor/processes/restarts.py": 1,
    "process/engine_checks.py": 3,
    "process/life.py": 1,
}
"""File -> number of tasks that it makes and awaits itself: in the same function or `async with`, possibly after
cancelling them. All other tasks belong to a `TaskOwner` (`pdserve/runtime/tasks.py`) or a TaskGroup."""


def test_no_background_task_ends_unseen() -> None:
    made = re.compile(r"(?<!tasks\.)(?<!group\.)(?<!_group\.)\b(?:create_task|ensure_future)\(")
    found = {
        name(path): len(made.findall(path.read_text()))
        for path in SOURCES
        if name(path) != "runtime/tasks.py"
    }
    assert {path: count for path, count in found.items() if count} == AWAITED_TASKS


ENDS_ANYWAY = {"frontend/app.py": 1, "frontend/model/run.py": 1, "process/life.py": 1}
"""File -> number of its handlers of `Exception` after which the task ends."""


def keeps_any_error(path: Path) -> int:
    """How many handlers of Exception around an `await` neither begin with `reraise_fatal` nor end with `raise`."""

    def keeps(handler: ast.ExceptHandler) -> bool:
        caught = ast.unparse(handler.type) if handler.type else "Exception"
        first, last = ast.unparse(handler.body[0]), handler.body[-1]
        passes = isinstance(last, ast.Raise) or "reraise_fatal(" in first
        return bool(re.search(r"\b(Base)?Exception(Group)?\b", caught)) and not passes

    def waits(block: ast.Try | ast.TryStar) -> bool:
        inside = (node for statement in block.body for node in ast.walk(statement))
        return any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in inside)

    blocks = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Try | ast.TryStar))
    return sum(keeps(handler) for block in blocks if waits(block) for handler in block.handlers)


def test_no_handler_keeps_a_cancellation_or_the_death_of_an_engine() -> None:
    """An error in a `finally` may replace a cancellation, and a group may contain the death of an engine."""
    found = {name(path): keeps_any_error(path) for path in SOURCES if name(path) != "runtime/tasks.py"}
    assert {path: count for path, count in found.items() if count} == ENDS_ANYWAY


def test_no_exception_is_used_as_a_boolean() -> None:
    """An exception is true even without a text, so `error or "it took too long"` is never that text. See
    `error_text`."""
    found = []
    for path in (*SOURCES, *BENCH):
        for handler in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)):
            for node in ast.walk(handler):
                if isinstance(node, ast.BoolOp) and isinstance(first := node.values[0], ast.Name):
                    found += [f"{path}:{node.lineno}"] * (first.id == handler.name)
    assert found == []


def test_only_commands_print() -> None:
    def prints(path: Path) -> bool:
        calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)

    quiet = [path for path in SOURCES if not name(path).startswith(MAY_PRINT)]
    assert [name(path) for path in quiet if prints(path)] == []


def test_the_locks_leave_out_what_breaks_the_cpu_build() -> None:
    left_out = {
        line.split(" ;")[0]
        for line in (ROOT / "requirements/leave-out-cpu.txt").read_text().splitlines()
        if " ;" in line
    }
    locked = (ROOT / "pdserve/install/cpu.txt").read_text().splitlines()
    assert {"torchvision", "torchaudio", "torchcodec"} <= left_out
    assert [line for line in locked if line.split("==")[0] in left_out] == []


def _blocks(markdown: Path) -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", markdown.read_text(), re.M | re.S):
        if language in ("", "sh", "bash", "shell", "console"):
            yield from (line.removeprefix("$ ") for line in block.splitlines())


def _documents() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
        (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.name)
def test_commands_of_the_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong = []
    for line in _blocks(document):
        wrong += [line for target in re.findall(r"^make ([a-z]+)", line) if target not in targets]
        found = re.findall(r"(?:^|\s)pdserve ([a-z]+)(?=\s|$)", line.split("#")[0])
        wrong += [line for command in found if command not in COMMANDS]
        wrong += [line for path in re.findall(r"configs/\S+\.yaml", line) if not (ROOT / path).exists()]
    assert wrong == []


def test_every_target_of_the_makefile_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M)) - {"dev"}
    assert targets == set(re.findall(r"^([a-z]+):.*##", makefile, re.M))
    assert {"install", "serve", "test", "lint", "format", "clean", "help"} <= targets


READING = ROOT / "docs/reading.md"
READING_LIMIT = 2700
"""lines that one can read in an evening"""


def _reading_list() -> dict[Path, tuple[int, int]]:
    """File -> number of lines to read: as the page states it, and as counted."""
    rows = re.findall(r"^\| \d+ \| \[.*?\]\((.*?)\) \| (.*?) \| (\d+) \|", READING.read_text(), re.M)
    paths = [((READING.parent / target).resolve(), read, int(stated)) for target, read, stated in rows]
    return {path: (stated, _lines_to_read(path, read)) for path, read, stated in paths}


def _lines_to_read(path: Path, read: str) -> int:
    """Count `all` lines, or those of the module's docstring and of the functions and classes in backticks. Raises
    KeyError for an unknown name."""
    if read == "all":
        return len(path.read_text().splitlines())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name: node for node in ast.walk(tree(path)) if isinstance(node, kinds)}
    parts = [tree(path).body[0], *(found[each] for each in re.findall(r"`(\w+)`", read))]
    return sum((part.end_lineno or 0) - part.lineno + 1 for part in parts)


def test_the_reading_list_takes_an_evening() -> None:
    sizes = _reading_list()
    assert len(sizes) > 10
    assert sum(lines for _, lines in sizes.values()) <= READING_LIMIT


def test_every_file_has_its_place_on_the_reading_page() -> None:
    page = READING.read_text()
    files = [name(path) for path in SOURCES if not path.name.startswith("__")]
    assert [file for file in files if f"(../pdserve/{file})" not in page] == []


def test_the_reading_list_states_sizes() -> None:
    """A size may be off by a tenth or three lines, so that few commits have to change the page."""
    found = {name(path): sizes for path, sizes in _reading_list().items()}
    wrong = {file: sizes for file, sizes in found.items() if abs(sizes[0] - sizes[1]) > max(3, sizes[1] / 10)}
    assert wrong == {}


def test_each_decision_has_a_status_below_its_title() -> None:
    heads = {path.name: path.read_text().splitlines()[:3] for path in (ROOT / "docs/decisions").glob("*.md")}
    right = re.compile(r"# \d{4}: .+\n\nStatus: (accepted|superseded by \[\d{4}\]\(.+\))")
    assert [name for name, head in heads.items() if not right.match("\n".join(head))] == []


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.name)
def test_links_of_the_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


# ── limits of size: a room may shrink silently, and grow with a reason ──────────────────────────────────────────────

ROOMS = {
    "both": 200,
    "cli": 1807,
    "config": 2460,
    "contract": 1450,
    "convert": 770,
    "decode": 3080,
    "engine": 3200,
    "frontend": 9260,
    "install": 290,
    "kv": 1870,
    "observe": 1590,
    "plan": 2180,
    "prefill": 900,
    "process": 1668,
    "queue": 2060,
    "registry": 1020,
    "runtime": 255,
    "security": 300,
    "stream": 910,
    "supervisor": 2734,
    "util": 410,
}
"""Maximum lines of each room of the package: its size on 2026-11-28 plus 5 %."""
BESIDE = {"benchmarks": 13400, "tests": 42850, "tools": 2400}
"""Maximum lines of the folders beside the package."""
WORDS, RECORD = 22000, 250
"""Maximum words of docs/ without the decisions, and of one decision record."""
ADVICE = (
    "Take out what your change made dead, or say the same in fewer lines. Where a feature is worth the lines, raise "
    "the limit here, and say in its decision record what it is worth to its user and what was taken out for it."
)


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def _words(path: Path) -> int:
    """Number of words without the bars and rules of tables."""
    return sum(bool(word.strip("|-")) for word in path.read_text().split())


def test_no_room_has_grown() -> None:
    sizes: dict[str, int] = dict.fromkeys(ROOMS, 0)
    for path in SOURCES:
        parts = Path(name(path)).parts
        if parts[0] in ROOMS:
            sizes[parts[0]] += _lines([path])
    assert {room: size for room, size in sizes.items() if size > ROOMS[room]} == {}, ADVICE
    rooms = {Path(name(path)).parts[0] for path in SOURCES if len(Path(name(path)).parts) > 1}
    assert rooms - ROOMS.keys() <= {"demo"}, ADVICE


def test_benches_tests_and_tools_have_not_grown() -> None:
    sizes = {folder: _lines((ROOT / folder).rglob("*.py")) for folder in BESIDE}
    assert {folder: size for folder, size in sizes.items() if size > BESIDE[folder]} == {}, ADVICE


def test_docs_have_not_grown() -> None:
    words = {path: _words(path) for path in (ROOT / "docs").rglob("*.md")}
    pages = sum(count for path, count in words.items() if path.parent.name != "decisions")
    assert pages <= WORDS, f"{pages} words: {ADVICE}"
    records = {path.name: count for path, count in words.items() if path.parent.name == "decisions"}
    assert {name: count for name, count in records.items() if count > RECORD} == {}, ADVICE
    assert len((ROOT / "README.md").read_text().split()) <= 1000, ADVICE
