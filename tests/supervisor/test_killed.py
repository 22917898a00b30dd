"""The supervisor itself is killed: nothing that it started may be left."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.conditions import until
from tests.supervisor.fakes import alive

SUPERVISOR = """
    import asyncio, sys
    from pathlib import Path
    from pdserve.messages import Role
    from tests.supervisor.fakes import Graph, fake

    ROLE = '''
        import os, signal, subprocess, sys, time
        child = "import os, signal, time; signal.signal(15, signal.SIG_IGN)"
        child += "; print('up', os.getpid(), flush=True); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", child])
        signal.signal(signal.SIGTERM, %s)
        print("up", os.getpid(), flush=True)
        time.sleep(600)
    '''

    async def main():
        jobs = [fake(ROLE % "signal.SIG_DFL"), fake(ROLE % "signal.SIG_IGN", Role.PREFILL)]
        async with Graph(Path(sys.argv[1]), *jobs) as graph:
            graph.output.console.file = sys.stdout
            await asyncio.sleep(600)

    asyncio.run(main())
"""


def start(log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(log.parent)],
            stdout=out,
            process_group=0,
            env={**os.environ, "PDSERVE_GUARDIAN_PATIENCE": "0.5"},
        )


async def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """One role dies with its parent and leaves a deaf child; the other is deaf itself."""
    log = tmp_path / "log"
    process = start(log)

    def pids() -> list[int]:
        lines = log.read_text().splitlines()
        return [int(line.rsplit(" ", 1)[1]) for line in lines if ": up " in line]

    await until(lambda: len(pids()) == 4)
    assert all(map(alive, pids()))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    await until(lambda: not any(map(alive, pids())), within=10)
