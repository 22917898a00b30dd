"""`vllm_diff` on two releases of a small vLLM, and a package that uses it."""

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
    "vllm/wire.py": "class Part:\n    request_id: str\n\nclass Output(Part):\n    count: int = 0\n",
}
NEW = OLD | {
    "vllm/core.py": OLD["vllm/core.py"]
    .replace("return timeout", "return timeout or 5")
    .replace("add(self, request)", "add(self, request, *, now)")
    .replace("return 1", "return 2"),
    "vllm/arguments.py": "",
    "vllm/wire.py": OLD["vllm/wire.py"] + "    error: str = ''\n",
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


def folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_what_moved_and_what_changed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_diff, "MESSAGES", {"vllm.wire.Output": "request_id"})
    monkeypatch.setattr(vllm_diff, "FUNCTIONS", {"vllm.core.Core.add": "self request"})
    with zipfile.ZipFile(tmp_path / "old.whl", "w") as archive:
        for name, text in OLD.items():
            archive.writestr(name, text)
    old, new = Release(str(tmp_path / "old.whl")), Release(str(folder(tmp_path / "new", NEW)))
    found = list(compare(old, new, folder(tmp_path / "ours", {"remote.py": OURS})))
    (body,) = [each for each in found if each.startswith("body of vllm.Core.stop:\n")]
    assert {"-    return timeout", "+    return timeout or 5"} <= set(body.splitlines())
    assert sorted(set(found) - {body}) == [
        "body of vllm.Core.step, used as it is",
        "fields of vllm.wire.Output: gone [], new ['error']",
        "import gone: vllm.arguments.make_parser (the name is defined in: vllm.common.arguments)",
        "parameters of vllm.core.Core.add: ['self', 'request'] -> ['self', 'request', 'now']",
    ]
