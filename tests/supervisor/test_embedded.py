import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.config.schema import Config
from pdserve.credentials import Credentials
from pdserve.errors import ConfigError
from pdserve.ports import free_port, port_holder
from pdserve.supervisor import embedded
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer, embedded_servers
from pdserve.supervisor.exits import Guardian
from pdserve.supervisor.guardian import alive
from pdserve.supervisor.restarts import RestartLoop
from tests.conditions import until
from tests.servers import kill, pid_of, restart
from tests.supervisor.fakes import QUICK

KINDS = pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])


@KINDS
async def test_starts_restarts_and_leaves_nothing(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    async with kind(tmp_path) as server:
        first, port = pid_of(server), server.port
        assert await server.answers()
        assert os.getsid(first) == os.getsid(0)
        assert os.getpgid(first) == first
        await restart(server)
        assert pid_of(server) != first
        assert server.port == port
        last = pid_of(server)
    assert not psutil.pid_exists(last)
    assert port_holder("127.0.0.1", port) is None
    assert server.log_path.is_file()


@KINDS
async def test_names_the_process_that_holds_the_port(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        await kind(tmp_path, port=taken.getsockname()[1]).start()
    assert f"(pid {os.getpid()})" in str(caught.value)


@KINDS
async def test_a_server_that_cannot_start_says_why(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind(tmp_path, port=free_port("127.0.0.1"))
    server.data_dir.mkdir()
    for name in ("jetstream", "data"):
        (server.data_dir / name).write_text("a file where the server wants a folder")
    with pytest.raises(ConfigError, match=r"ended while starting: .*more in "):
        await server.start()
    assert server.child is None


async def test_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from pdserve.supervisor.embedded import EmbeddedNats\n"
        "server = EmbeddedNats(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(server.start())\n"
        "print(server.child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    async with asyncio.timeout(30):
        while psutil.pid_exists(int(out)):  # noqa: ASYNC110 (the kernel does not tell us of a grandchild's end)
            await asyncio.sleep(0.01)
    async with EmbeddedNats(tmp_path) as server:
        assert await server.answers()


@pytest.mark.parametrize("name", ["nats", "etcd"])
async def test_a_server_that_ends_or_hangs_is_back_at_its_address(
    name: str,
    tmp_path: Path,
    credentials: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for constant, seconds in {"HANGS_AFTER": 0.3, "CHECK_EVERY": 0.1, "ANSWER_WITHIN": 0.5}.items():
        monkeypatch.setattr(embedded, constant, seconds)
    others = {other: "not ours" for other in ("nats", "etcd") if other != name}
    config = Config(tmp_path / "f", "m", "m", None, None, None, state_dir=tmp_path, **others)  # type: ignore[arg-type]

    def pid() -> int:
        holder = port_holder("127.0.0.1", int(urls[name].rpartition(":")[2])) or ""
        return int(holder.partition("(pid ")[2].removesuffix(")"))

    with Guardian(patience=1) as guardian:
        async with embedded_servers(config, guardian, QUICK, credentials) as urls:
            assert list(urls) == [name]
            os.kill(pid(), signal.SIGKILL)
            await until(lambda: "is back at" in caplog.text)
            second = pid()
            os.kill(second, signal.SIGSTOP)
            await until(lambda: not alive(second))
            await until(lambda: caplog.text.count(f"{name} is back at {urls[name]}") >= 2)
            assert f"{name} hangs: it has answered nothing for" in caplog.text
            third = pid()
            assert alive(third)
        assert not alive(third)


class _Mute(EmbeddedNats):
    mute = False

    async def answers(self) -> bool:
        return not self.mute and await super().answers()


async def test_a_server_that_never_answers_is_killed_and_counts_as_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = _Mute(tmp_path)
    loop = RestartLoop(server, QUICK, lambda _: None, await server.start())
    running = asyncio.create_task(loop.run())
    monkeypatch.setattr(embedded, "READY_WITHIN", 0.1)
    server.mute = True
    await kill(server)
    await until(lambda: "starts again in 0.04 s" in caplog.text)
    assert "nats does not become ready: nats does not answer after 0.1 s" in caplog.text
    await loop.stop(5)
    await running
    assert not alive(pid_of(server))


@KINDS
async def test_a_server_starts_though_its_log_cannot_be_written(
    kind: type[EmbeddedServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.write_text("in the way")
    async with kind(tmp_path) as server:
        assert await server.answers()
        assert f"{server.log_path} cannot be written" in caplog.text
        logs.unlink()
        await restart(server)
        assert await server.answers()
        if kind is EmbeddedNats:  # etcd has nothing to warn of
            await until(lambda: server.log_path.exists() and "Server is ready" in server.log_path.read_text())
            assert server.log_path.stat().st_mode & 0o777 == 0o600
