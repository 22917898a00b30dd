"""Real engines, two of each, in float32, where every answer has to be the undisturbed one's to the last token: the
faults that an engine itself can suffer. The other ones are tried with simulated engines."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.engines, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
NEEDED = 13 << 30
"""bytes: four engines of 2.6 GB, two frontends"""


@pytest.mark.skipif(psutil.virtual_memory().total < NEEDED, reason="needs 13 GB of memory")
def test_killed_hung_and_cut_engines_drop_nothing(chaos: Callable[..., Run]) -> None:
    faults = ["prefill-cut", "prefill-hang", "prefill-kill", "decode-kill", "all-decode-kill"]
    options = ("--dtype", "float32", "--only", ",".join(faults), "--seconds", "3")
    rows = chaos(ROOT / "configs/local.yaml", *options).good()
    assert [row["fault"] for row in rows] == faults
