"""Fixtures: chaos runs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pdserve_bench.hosts.network import network

from pdserve.util.errors import Unavailable
from tests.chaos.command import Run


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`chaos(file, *options)` starts a run; several may run at a time."""
    runs: list[Run] = []

    def start(file: Path, *options: str) -> Run:
        runs.append(Run.start(tmp_path / f"run-{len(runs)}", file, *options))
        return runs[-1]

    yield start
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.process.wait()


@pytest.fixture
def may_have_hosts(tmp_path: Path) -> bool:
    """Whether this machine permits simulated hosts (network namespaces)."""
    try:
        with network(tmp_path) as net:
            net.host("first").vanish()
    except Unavailable:
        return False
    return True
