import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.errors import ConfigError
from pdserve.ports import free_port, port_holder
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from tests.servers import kill

KINDS = pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])


@KINDS
async def test_starts_restarts_and_leaves_nothing(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    async with kind(tmp_path) as server:
        first, port = server.pid, server.port
        assert first
        assert await server.answers()
        assert os.getsid(first) == os.getsid(0)
        assert os.getpgid(first) == first
        await server.restart()
        assert server.pid != first
        assert server.port == port
        last = server.pid
    assert not psutil.pid_exists(last or 0)
    assert port_holder("127.0.0.1", port) is None
    assert server.log_path.is_file()


@KINDS
async def test_wait_reports_a_crash_and_restart_mends_it(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    async with kind(tmp_path) as server:
        await kill(server)
        assert await server.wait() == -signal.SIGKILL
        await server.restart()
        assert await server.answers()


@KINDS
async def test_says_who_holds_the_port(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        await kind(tmp_path, port=taken.getsockname()[1]).start()
    assert f"(pid {os.getpid()})" in str(caught.value)


@KINDS
async def test_two_servers_never_share_data(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    async with kind(tmp_path) as server:
        with pytest.raises(ConfigError, match=rf"in use by another {server.name} \(pid {server.pid}\)"):
            await kind(tmp_path).start()


@KINDS
async def test_a_server_that_cannot_start_says_why(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind(tmp_path, port=free_port("127.0.0.1"))
    server.data_dir.mkdir()
    for name in ("jetstream", "data"):
        (server.data_dir / name).write_text("a file where the server wants a folder")
    with pytest.raises(ConfigError, match=r"ended while starting: .*more in "):
        await server.start()
    assert server.pid is None


async def test_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from pdserve.supervisor.embedded import EmbeddedNats\n"
        "server = EmbeddedNats(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(server.start())\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    async with asyncio.timeout(5):
        while psutil.pid_exists(int(out)):  # noqa: ASYNC110 (nobody tells us of a grandchild's end)
            await asyncio.sleep(0.01)
    async with EmbeddedNats(tmp_path) as server:
        assert await server.answers()
