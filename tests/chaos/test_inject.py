"""What is done to victims, on real processes and a real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pdserve_bench.chaos.faults import Kind, Victim
from pdserve_bench.chaos.inject import injected

from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from tests.conditions import until


@pytest.fixture
def victims() -> Iterator[list[Victim]]:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    yield [Victim(f"decode-{number}", process.pid) for number, process in enumerate(processes)]
    for process in processes:
        process.kill()
        process.communicate()


def _all(victims: list[Victim], status: str) -> bool:
    return all(psutil.Process(one.group).status() == status for one in victims)


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.DRAIN])
async def test_they_end(victims: list[Victim], tmp_path: Path, kind: Kind) -> None:
    async with injected(kind, victims, os.getpid(), tmp_path):
        await until(lambda: _all(victims, psutil.STATUS_ZOMBIE))


async def test_they_hang_and_go_on(victims: list[Victim], tmp_path: Path) -> None:
    async with injected(Kind.HANG, victims, os.getpid(), tmp_path):
        await until(lambda: _all(victims, psutil.STATUS_STOPPED))
    await until(lambda: _all(victims, psutil.STATUS_SLEEPING))


async def test_one_that_has_ended_cannot_be_harmed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], process_group=0)  # noqa: ASYNC220
    process.wait()
    with pytest.raises(LookupError, match="decode-0 has ended by itself"):
        async with injected(Kind.KILL, [Victim("decode-0", process.pid)], os.getpid(), tmp_path):
            pass


@pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])
async def test_a_server_comes_back_without_its_data(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    async with kind(tmp_path) as server:
        (server.data_dir / "something").mkdir()
        for time in (1, 2):
            assert server.pid is not None
            async with injected(Kind.LOSE, [Victim(kind.name, server.pid)], os.getpid(), tmp_path):
                assert server.child
                assert (await server.child.wait()).code == -9
            assert [each.name for each in server.data_dir.iterdir()] == ["lock"]
            await server.restart()
            assert len(list((tmp_path / f"{kind.name}-lost").iterdir())) > time
