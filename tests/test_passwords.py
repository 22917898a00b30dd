"""A password in the URL of a NATS server appears in no log, no error and on no page."""

import logging
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.cli.setup.doctor import check_nats
from pdserve.queue.jetstream.connection import NatsConnection
from pdserve.util.errors import QueueUnavailable
from pdserve.util.net import free_port, strip_passwords
from tests.conditions import until
from tests.servers import kill, nats_server

SCHEME_AND_PASSWORD = "nats://user:sword@fish@"


def test_passwords_are_stripped_from_addresses() -> None:
    assert (
        strip_passwords(f"{SCHEME_AND_PASSWORD}10.0.0.5:4222,tls://b:4222,c:2379")
        == "nats://10.0.0.5:4222,tls://b:4222,c:2379"
    )
    assert strip_passwords("") == ""


async def test_logs_of_reachable_and_unreachable_servers_hide_passwords(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pdserve")
    async with nats_server(tmp_path) as server:
        url = server.url.replace("nats://", SCHEME_AND_PASSWORD)
        (found,) = await check_nats(url, None)
        assert (found.grade, found.text) == ("ok", f"{server.url} answers, JetStream is enabled")
        async with NatsConnection(url, None, "waiting") as connection:
            await until(lambda: connection.connected)
            await kill(server)
            await until(
                lambda: f"nats: disconnected from {server.url}; waiting until it reconnects" in caplog.text
            )
            with pytest.raises(QueueUnavailable, match=f"disconnected from NATS at {server.url}"):
                connection.client()
            (found,) = await check_nats(url, None)
            assert (found.grade, server.url in found.text) == ("fail", True)
        assert "sword" not in caplog.text + found.text


@pytest.mark.parametrize(("path", "code"), [("", 0), ("/path", 2)])
def test_plan_hides_the_secret(
    path: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "graph.yaml").write_text(
        f"Graph: {{nats: '{SCHEME_AND_PASSWORD}127.0.0.1:{free_port('127.0.0.1')}{path}', etcd: '127.0.0.1:1'}}\n"
        "VllmWorker: {model: demo, engine: sim}\n"
    )
    for options in ((), ("--json",)):
        assert main(["plan", "-f", str(file), *options]) == code
        shown = "".join(capsys.readouterr())
        assert "nats://127.0.0.1" in shown
        assert "sword" not in shown
