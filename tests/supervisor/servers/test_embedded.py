import asyncio
import os
import signal
import socket
from functools import partial
from pathlib import Path

import psutil
import pytest
from pdserve_bench.chaos.processes.faults import damage

from pdserve import queue, registry
from pdserve.config.schema import Config
from pdserve.security.credentials import Credentials
from pdserve.supervisor import state
from pdserve.supervisor.processes.exits import Guardian
from pdserve.supervisor.processes.guardian import alive
from pdserve.supervisor.processes.restarts import ProcessState, RestartLoop
from pdserve.supervisor.servers import embedded
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer, embedded_servers
from pdserve.supervisor.servers.kept_keys import KeptKeys
from pdserve.util.errors import ConfigError
from pdserve.util.net import find_port_holder
from tests.conditions import until
from tests.full_disk import small_disk
from tests.queue.requests import publish
from tests.servers import SmallEtcd, kill, pid_of, restart
from tests.supervisor.fakes import QUICK


async def test_the_error_names_the_process_that_holds_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        await EmbeddedNats(tmp_path, port=taken.getsockname()[1]).start()
    assert f"(pid {os.getpid()})" in str(caught.value)


@pytest.mark.parametrize("kind", [EmbeddedNats, EmbeddedEtcd])
async def test_a_server_that_cannot_start_says_why(kind: type[EmbeddedServer], tmp_path: Path) -> None:
    server = kind(tmp_path)
    server.data_dir.mkdir(parents=True)
    for name in ("jetstream", "data"):
        (server.data_dir / name).write_text("a file where the server wants a folder")
    with pytest.raises(ConfigError, match=r"ended while starting: .*(not a directory).*more in "):
        await server.start()
    assert server.child is None


async def test_the_error_of_a_full_disk_has_no_stack(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, pytest.raises(ConfigError) as caught:
        await EmbeddedEtcd(disk.path).start()
    assert "failed to create WAL: no space left on device (more in " in str(caught.value)


async def test_damaged_data_do_not_prevent_a_start(
    tmp_path: Path, credentials: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """The data are damaged before the first start, and again before a restart by `serve`. Then `serve` puts the
    keys without a lease back into etcd."""
    config = Config(tmp_path / "f", "m", "m", None, None, None, state_dir=tmp_path)
    for kind in (EmbeddedNats, EmbeddedEtcd):
        async with kind(tmp_path, credentials=credentials) as server:
            await kill(server)
            damage(server.data_dir)

    async def works(urls: dict[str, str]) -> dict[str, bytes]:
        async with (
            registry.connect(urls["etcd"], "pdserve", credentials) as etcd,
            queue.connect(urls["nats"], "pdserve", "m", credentials) as prompts,
        ):
            await publish(prompts, "a")
            await etcd.put("settings/b", b"2", leased=False)
            return await etcd.read("")

    with Guardian(patience=1) as guardian, state.locked(tmp_path) as folder:
        folder.keep("settings.json", f'{{"file": "{config.path}", "settings/a": "1"}}'.encode())
        folder.record(state.GraphRecord(os.getpid(), "", "m", "pdserve", "", ""))
        kept = KeptKeys(folder, config, credentials)
        servers = embedded_servers(config, folder, guardian, QUICK, credentials, kept)
        async with servers as urls:
            assert (await works(urls))["settings/a"] == b"1"
            for name in urls:
                process = _process(urls[name])
                process.suspend()  # so that the server is not restarted before the damage
                damage(tmp_path / "servers" / name)
                process.kill()
                await until(partial(_logged, caplog, f"{name} is ready again at"))
            assert (await works(urls))["settings/a"] == b"1"
    assert not (tmp_path / "servers/etcd").exists(), "its data are removed"


def _logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


def _process(url: str) -> psutil.Process:
    holder = find_port_holder("127.0.0.1", int(url.rpartition(":")[2])) or ""
    return psutil.Process(int(holder.partition("(pid ")[2].removesuffix(")")))


@pytest.mark.parametrize("name", ["nats", "etcd"])
async def test_a_dead_or_hung_server_is_restarted_at_its_address(
    name: str,
    tmp_path: Path,
    credentials: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for constant, seconds in {"HANGS_AFTER": 0.3, "CHECK_INTERVAL": 0.1, "CHECK_TIMEOUT": 0.5}.items():
        monkeypatch.setattr(embedded, constant, seconds)
    others = {other: "not ours" for other in ("nats", "etcd") if other != name}
    config = Config(tmp_path / "f", "m", "m", None, None, None, state_dir=tmp_path, **others)  # type: ignore[arg-type]

    with Guardian(patience=1) as guardian, state.locked(tmp_path) as folder:
        async with embedded_servers(config, folder, guardian, QUICK, credentials) as urls:
            assert list(urls) == [name]
            os.kill(_process(urls[name]).pid, signal.SIGKILL)
            await until(lambda: "is ready again at" in caplog.text)
            second = _process(urls[name]).pid
            os.kill(second, signal.SIGSTOP)
            await until(lambda: not alive(second))
            await until(lambda: caplog.text.count(f"{name} is ready again at {urls[name]}") >= 2)
            assert f"{name} hangs: no healthy answer for" in caplog.text
            third = _process(urls[name]).pid
            assert alive(third)
        assert not alive(third)


async def test_a_full_etcd_is_restarted_without_the_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    etcd = SmallEtcd(tmp_path)
    loop = RestartLoop(etcd, QUICK, lambda _: None, await etcd.start())
    for constant, seconds in {"HANGS_AFTER": 0.3, "CHECK_INTERVAL": 0.1}.items():
        monkeypatch.setattr(embedded, constant, seconds)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.state is ProcessState.READY)
    await etcd.fill_up()
    await until(lambda: "etcd ended" in caplog.text and loop.state is ProcessState.READY)
    assert (
        'etcd hangs: no healthy answer for 0.3 s ({"health":"false","reason":"ALARM NOSPACE"}' in caplog.text
    )
    async with registry.connect(etcd.url, "pdserve") as joined:
        await joined.put("settings/a", b"1", leased=False)
    await loop.stop(5)
    await running


class _Mute(EmbeddedNats):
    mute = False

    async def answers(self) -> bool:
        return not self.mute and await super().answers()


async def test_a_server_that_never_answers_counts_as_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = _Mute(tmp_path)
    loop = RestartLoop(server, QUICK, lambda _: None, await server.start())
    running = asyncio.create_task(loop.run())
    monkeypatch.setattr(embedded, "READY_TIMEOUT", 0.1)
    server.mute = True
    await kill(server)
    await until(lambda: "restarting it in 0.04 s" in caplog.text)
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
        assert f"cannot write {server.log_path}" in caplog.text
        logs.unlink()
        await restart(server)
        await until(lambda: server.log_path.exists() and "Server is ready" in server.log_path.read_text())
        assert server.log_path.stat().st_mode & 0o777 == 0o600
