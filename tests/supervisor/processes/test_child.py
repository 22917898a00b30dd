import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.contract.records import Role
from pdserve.plan.graph import ProcessSpec
from pdserve.supervisor.processes.child import Child, Exit
from pdserve.supervisor.processes.guardian import alive, is_tracker, members
from tests.conditions import until
from tests.supervisor.fakes import fake


def start(spec: ProcessSpec, on_line: Callable[[str], None]) -> Child:
    return Child(spec.name, spec.command, on_line, env=spec.env)


async def run(script: str, **env: str) -> tuple[Exit, list[str]]:
    lines: list[str] = []
    child = start(fake(script, Role.DECODE, 0, **env), lines.append)
    return await child.wait(), lines


async def test_every_line_of_both_streams_comes_in_order() -> None:
    """Lines may be progress bars, not UTF-8, very long or unfinished."""
    end, lines = await run(r"""
        import sys
        for i in range(300):
            print(i, file=sys.stdout if i % 2 else sys.stderr, flush=True)
        sys.stdout.buffer.write(b"10%\r20%\r\n\n\xff\xfe ok\n")
        sys.stdout.write("x" * 200_000 + "\nno end")
    """)
    odd = ["10%", "20%", "\ufffd\ufffd ok", "x" * 200_000, "no end"]
    assert lines == [*map(str, range(300)), *odd]
    assert end == Exit(0, tuple(lines[-30:]))


async def test_a_failing_callback_does_not_end_the_reader() -> None:
    def take(line: str) -> None:
        raise KeyError(line)

    end = await start(fake("for i in range(50): print(i)"), take).wait()
    assert (end.code, end.last_lines[-1]) == (0, "49")


async def test_a_child_has_its_own_process_group_and_no_input() -> None:
    _, lines = await run(
        "import os, sys; print(os.environ['COLOUR'], repr(sys.stdin.read()))\n"
        "print(os.getpgid(0) == os.getpid(), os.getsid(0))",
        COLOUR="red",
    )
    assert lines == ["red ''", f"True {os.getsid(0)}"]


FORKED = """
    import mmap, multiprocessing, os, sys, time
    from multiprocessing import shared_memory
    with open(f"/dev/shm/vllm_offload_decode-0-{os.getpid()}.mmap", "w+b") as region:
        region.write(bytes(4096))
        region.flush()
        mapped = mmap.mmap(region.fileno(), 4096)
    print(os.path.basename(region.name), flush=True)
    memory = shared_memory.SharedMemory(create=True, size=4096)
    print(memory.name, flush=True)
    if os.fork() == 0:
        memory = shared_memory.SharedMemory(create=True, size=4096)
        print(memory.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def foreign_memory() -> Iterator[None]:
    """Shared memory of another program; checks that it remains."""
    path = Path(f"/dev/shm/psm_{secrets.token_hex(4)}")
    path.write_bytes(bytes(4096))
    try:
        yield
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.usefixtures("foreign_memory")
@pytest.mark.parametrize(
    "noted", [True, False], ids=["all killed at once", "its tracker and its leader killed"]
)
async def test_the_group_and_shared_memory_of_a_child_end_with_it(noted: bool) -> None:
    """The child's memory is found through its processes, so that memory of other programs remains. `noted`: the
    memory is noted before all are killed. Otherwise, Python's resource tracker is killed first, and then the child."""
    lines: list[str] = []
    child = start(fake(FORKED), lines.append)
    await until(lambda: len(lines) == 3)
    paths = [Path("/dev/shm") / line.lstrip("/") for line in lines]
    assert all(path.exists() for path in paths)
    group = members(child.pid)
    if noted:
        child.note_memory()
        os.killpg(child.pid, signal.SIGKILL)
    else:
        for pid in filter(is_tracker, members(child.pid)):
            os.kill(pid, signal.SIGKILL)
        child.kill()
    assert (await child.wait()).code == -signal.SIGKILL
    assert not any(path.exists() for path in paths)
    assert not any(map(alive, group))


async def test_wait_returns_though_a_grandchild_holds_the_pipe() -> None:
    """A daemon that left the child's group may keep our pipe as its stdout."""
    lines: list[str] = []
    child = start(
        fake("""
            import subprocess, sys
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
            print(child.pid, flush=True)
        """),
        lines.append,
    )
    async with asyncio.timeout(30):
        end = await child.wait()
    assert end.code == 0
    os.kill(int(lines[0]), signal.SIGKILL)
