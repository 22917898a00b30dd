"""Some faults on real engines. In float32, every output must equal that of the undisturbed graph. Most other faults
are tested with simulated engines."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.command import Run

pytestmark = [pytest.mark.chaos, pytest.mark.engines, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
NEEDED = 13 << 30
"""Bytes for four engines of 2.6 GB and two frontends."""


@pytest.mark.skipif(psutil.virtual_memory().total < NEEDED, reason="needs 13 GB of memory")
def test_killed_and_hung_engines_drop_nothing(chaos: Callable[..., Run]) -> None:
    faults = ["prefill-hang", "prefill-core-kill", "all-decode-core-kill"]
    options = ("--dtype", "float32", "--only", ",".join(faults), "--seconds", "3")
    rows = chaos(ROOT / "configs/local.yaml", *options).good()
    assert [row["fault"] for row in rows] == faults


def test_engines_on_hosts_drop_nothing(chaos: Callable[..., Run], may_have_hosts: bool) -> None:
    """KV is transferred between two hosts whose link is first cut and then slow. Other faults of `--hosts` are tested
    with simulated engines."""
    if not may_have_hosts:
        pytest.skip("this machine permits no network namespaces: tests/bench/test_hosts.py says why")
    faults = ["prefill-link-cut-10s", "delay-50ms"]
    options = ("--hosts", "--workers", "1", "--dtype", "float32", "--only", ",".join(faults))
    rows = chaos(ROOT / "configs/local.yaml", *options, "--seconds", "3", "--hold", "4").good()
    assert [row["fault"] for row in rows] == faults
