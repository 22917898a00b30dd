"""The end of a vLLM engine after the end of a rank, without a model."""

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest

from pdserve.contract.records import Role
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.engine.vllm.process import VllmProcess, death_of
from pdserve.util.errors import Unavailable
from tests.conditions import until

forking = multiprocessing.get_context("fork")


def act_core(number: int, pids: "multiprocessing.SimpleQueue[int | None]") -> None:
    """Act as a core with a rank that ends by this signal; 0: with status 1."""
    ranks = [forking.Process(target=time.sleep, args=(60,)), forking.Process(target=_end, args=(number,))]
    executor = SimpleNamespace(workers=[SimpleNamespace(proc=rank) for rank in ranks])
    for rank in ranks:
        rank.start()
        pids.put(rank.pid)
    api.MultiprocExecutor.start_worker_monitor(executor)
    time.sleep(60)


def _end(number: int) -> None:
    if number:
        faulthandler.disable()
        os.kill(os.getpid(), number)
    os._exit(1)


def _has_ended(pid: int | None) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("number", "crashed"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGSEGV, True), (0, True)],
)
async def test_a_core_ends_when_a_rank_ends_and_its_status_says_how(
    number: int, crashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.MultiprocExecutor, "start_worker_monitor", None)
    api.end_with_ranks()
    pids = forking.SimpleQueue()
    core = forking.Process(target=act_core, args=(number, pids))
    core.start()
    ranks = [pids.get(), pids.get()]
    await asyncio.to_thread(core.join, 30)
    death = death_of(core.exitcode)
    assert death.crashed == crashed
    assert number == 0 or signal.Signals(number).name in str(death)
    await until(lambda: all(map(_has_ended, ranks)))


@pytest.mark.parametrize(
    ("status", "crashed"),
    [(None, True), (1, True), (-6, True), (-4, True), (-9, False), (-15, False), (0, False)],
)
def test_a_core_that_was_killed_or_ended_with_status_0_did_not_crash(
    status: int | None, crashed: bool
) -> None:
    """None: the core reported an error and has not ended."""
    assert death_of(status).crashed == crashed


async def test_an_unreachable_hub_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(argv: object, headless: bool) -> None:
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them."
        )

    monkeypatch.setattr(api, "engine_config", unreachable)
    engine = VllmProcess(EngineSpec(Role.DECODE, "decode-0-test", "Qwen/Qwen3-0.6B"))
    with pytest.raises(Unavailable, match=r"^Qwen/Qwen3-0.6B cannot be downloaded"):
        await engine.start("ipc:///events")
