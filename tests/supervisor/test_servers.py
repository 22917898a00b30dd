"""Servers of our own are watched like the roles."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve.supervisor import servers
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.supervisor.guardian import Guardian
from tests.conditions import until
from tests.servers import kill
from tests.supervisor.fakes import QUICK, alive


@pytest.fixture(params=[EmbeddedNats, EmbeddedEtcd])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> EmbeddedServer:
    made: EmbeddedServer = request.param(tmp_path)
    return made


async def test_one_that_ends_or_hangs_is_back_on_its_port(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in {"HANGS_AFTER": 0.3, "LOOK_EVERY": 0.1, "ANSWER_WITHIN": 0.2}.items():
        monkeypatch.setattr(servers, name, seconds)
    with Guardian(patience=1) as guardian:
        server = type(server)(server.state_dir, guardian=guardian)
        async with server:
            port = server.port
            keeping = asyncio.create_task(servers.keep(server, QUICK))
            await kill(server)
            await until(lambda: "is back at" in caplog.text, within=20)
            first = server.pid
            assert first
            os.kill(first, signal.SIGSTOP)
            await until(lambda: not alive(first), within=20)
            await until(lambda: caplog.text.count("is back at") == 2, within=20)
            assert f"{server.name} hangs" in caplog.text
            assert server.port == port
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
