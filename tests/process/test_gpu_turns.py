"""Engines that start on one GPU."""

import asyncio
import os
from pathlib import Path

from pdserve.process.gpu_turns import gpu_turns
from tests.conditions import until


async def test_engines_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    begun, ends = list[str](), {name: asyncio.Event() for name in ("first", "second", "beside")}

    async def start(name: str, *gpus: int) -> None:
        async with gpu_turns(gpus, tmp_path):
            begun.append(name)
            await ends[name].wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(start("first", 0, 1))
        await until(lambda: begun == ["first"])
        group.create_task(start("second", 1, 2))
        group.create_task(start("beside", 3))
        await until(lambda: begun == ["first", "beside"])
        ends["first"].set()
        await until(lambda: begun == ["first", "beside", "second"])
        for end in ends.values():
            end.set()


async def test_a_forked_engine_does_not_keep_the_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    async with gpu_turns([0], tmp_path):
        if (child := os.fork()) == 0:
            os.read(reading, 1)
            os._exit(0)
    async with asyncio.timeout(5), gpu_turns([0], tmp_path):
        pass
    os.write(writing, b"x")
    os.waitpid(child, 0)  # noqa: ASYNC222


async def test_an_engine_starts_without_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "gpu-0.lock").symlink_to(tmp_path / "elsewhere")
    async with gpu_turns([0], tmp_path):
        pass
