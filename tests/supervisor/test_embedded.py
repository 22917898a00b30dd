import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from pdserve.config.schema import Config
from pdserve.credentials import Credentials
from pdserve.errors import ConfigError
from pdserve.ports import port_holder
from pdserve.supervisor import embedded
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer, embedded_servers
from pdserve.supervisor.exits import Guardian
from pdserve.supervisor.guardian import alive
from pdserve.supervisor.restarts import RestartLoop
from tests.conditions import until
from tests.servers import kill, pid_of, restart
from tests.supervisor.fakes import QUICK


async def test_names_the_process_that_holds_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        await EmbeddedNats(tmp_path, port=taken.getsockname()[1]).start()
    assert f"(pid {os.getpid()})" in str(caught.value)


@pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])
async def test_a_server_that_cannot_start_says_why(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind(tmp_path)
    server.data_dir.mkdir()
    for name in ("jetstream", "data"):
        (server.data_dir / name).write_text("a file where the server wants a folder")
    with pytest.raises(ConfigError, match=r"ended while starting: .*more in "):
        await server.start()
    assert server.child is None


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


async def test_a_server_starts_though_its_log_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.write_text("in the way")
    async with EmbeddedNats(tmp_path) as server:
        assert await server.answers()
        assert f"{server.log_path} cannot be written" in caplog.text
        logs.unlink()
        await restart(server)
        await until(lambda: server.log_path.exists() and "Server is ready" in server.log_path.read_text())
        assert server.log_path.stat().st_mode & 0o777 == 0o600
