"""Two releases of a small vLLM, and a package that uses it."""

import zipfile
from pathlib import Path

import pytest

from tools import vllm_diff
from tools.vllm_diff import Release, compare

OLD = {
    "vllm/__init__.py": "from .core import Core as Core\n",
    "vllm/core.py": """
class Base:
    def stop(self, timeout=None):
        return timeout

class Core(Base):
    def add(self, request):
        return request

    def step(self):
        return 1
""",
    "vllm/arguments.py": "def make_parser():\n    return 1\n",
}
NEW = OLD | {
    "vllm/core.py": OLD["vllm/core.py"]
    .replace("return timeout", "return timeout or 5")
    .replace("return 1", "return 2"),
    "vllm/arguments.py": "",
    "vllm/common/__init__.py": "",
    "vllm/common/arguments.py": OLD["vllm/arguments.py"],
}
OURS = """
from vllm import Core
from vllm.arguments import make_parser

class Remote(Core):
    def stop(self, timeout=None):
        return self.step()
"""


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/remote.py").write_text(OURS)
    return tmp_path / "ours"


def wheel(path: Path, files: dict[str, str]) -> Release:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return Release(str(path))


def folder(path: Path, files: dict[str, str]) -> Release:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return Release(str(path))


def test_moved_names_and_changed_bodies_are_reported(tmp_path: Path, ours: Path) -> None:
    old, new = wheel(tmp_path / "old.whl", OLD), folder(tmp_path / "new", NEW)
    gone, body, used = compare(old, new, ours)
    assert gone == "import gone: vllm.arguments.make_parser (the name is defined in: vllm.common.arguments)"
    first, *lines = body.splitlines()
    assert first == "body of vllm.Core.stop:"
    assert "-    return timeout" in lines
    assert "+    return timeout or 5" in lines
    assert used == "body of vllm.Core.step, used as it is"


def test_fields_and_parameters_of_the_table(
    tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_diff, "MESSAGES", {"vllm.wire.Output": "request_id"})
    monkeypatch.setattr(vllm_diff, "FUNCTIONS", {"vllm.core.Core.add": "self request"})
    wire = "class Part:\n    request_id: str\n\nclass Output(Part):\n    count: int = 0\n"
    more = wire + "    error: str = ''\n"
    changed = OLD["vllm/core.py"].replace("add(self, request)", "add(self, request, *, now)")
    old = wheel(tmp_path / "old.whl", OLD | {"vllm/wire.py": wire})
    new = wheel(tmp_path / "new.whl", OLD | {"vllm/wire.py": more, "vllm/core.py": changed})
    assert list(compare(old, new, ours)) == [
        "fields of vllm.wire.Output: gone [], new ['error']",
        "parameters of vllm.core.Core.add: ['self', 'request'] -> ['self', 'request', 'now']",
    ]
