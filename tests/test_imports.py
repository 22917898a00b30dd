"""torch's compiler, which frontends do not import."""

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import imports
from pdserve.imports import import_large

SCRIPT = """
import sys
from pdserve.imports import without_compiler

def double(x): return 2 * x

with without_compiler():
    import torch
    from torch._dynamo import disable
    from torch._inductor.custom_graph_pass import CustomGraphPass
    assert disable(double) is disable()(double) is double
    assert torch.compile(double) is torch.compile(dynamic=True)(double) is double
    class Pass(CustomGraphPass): pass
assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
from torch._dynamo import is_compiling
assert is_compiling() is False
assert torch.compile(double, backend="eager") is not double
"""


def test_it_is_left_out_where_asked_for_and_there_afterwards() -> None:
    """In a process that has not imported it before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_needs_it_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_compiler.py").write_text("passes = 42")
    (tmp_path / "computes_with_it.py").write_text("from some_compiler import passes\nmore = passes + 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "COMPILER", ("some_compiler",))
    assert import_large("computes_with_it", compiler=False).more == 43
