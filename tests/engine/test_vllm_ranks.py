"""An engine whose ranks are processes of their own ends when one of them does."""

import asyncio
import subprocess
import sys

import psutil

from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm.process import VllmProcess
from pdserve.records import Role
from tests.conditions import until

NAMED = "import setproctitle, sys, time; setproctitle.setproctitle(sys.argv[1]); print(flush=True); time.sleep(60)"


async def test_an_engine_without_one_of_its_ranks_is_ended() -> None:
    names = ("VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1", "a helper that is gone")
    command, pipe = [sys.executable, "-c", NAMED], subprocess.PIPE
    started = [subprocess.Popen([*command, name], stdout=pipe) for name in names]  # noqa: ASYNC220
    core, other, dies, gone = started
    try:
        for each in started:
            assert each.stdout is not None
            each.stdout.readline()
        engine = VllmProcess(EngineSpec(Role.DECODE, "decode-0-test", "demo"))
        engine.processes = {psutil.Process(each.pid) for each in started}
        gone.kill()
        gone.wait()
        ending = asyncio.create_task(engine.end_together())
        await asyncio.sleep(0)
        assert core.poll() is None
        dies.kill()
        await until(lambda: core.poll() == other.poll() == -9)
        await ending
    finally:
        for each in started:
            each.kill()
            each.communicate()
