"""How an engine with processes of its own fails: with one of its ranks, or without its model."""

import asyncio
import subprocess
import sys

import psutil
import pytest

from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.engine.vllm.process import VllmProcess
from pdserve.errors import Unavailable
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


async def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(argv: object, headless: bool) -> None:
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them."
        )

    monkeypatch.setattr(api, "engine_config", unreachable)
    engine = VllmProcess(EngineSpec(Role.DECODE, "decode-0-test", "Qwen/Qwen3-0.6B"))
    with pytest.raises(Unavailable, match=r"^Qwen/Qwen3-0.6B cannot be downloaded"):
        await engine.start("ipc:///events")
