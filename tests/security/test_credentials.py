"""The graph's certificates: created, private, and checked by both sides."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.cli.setup.credentials import make_credentials
from pdserve.security.credentials import CERTIFICATE_NAME, Credentials, create, expiry_warning
from pdserve.util import clock
from pdserve.util.errors import ConfigError
from tests.tcp import tcp_server


def make(folder: Path) -> Credentials:
    found = Credentials.load(create(folder).folder)
    assert found is not None
    return found


@asynccontextmanager
async def greeter(credentials: Credentials) -> AsyncIterator[int]:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with tcp_server(greet, credentials.server_context()) as port:
        yield port


async def greeted(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=CERTIFICATE_NAME
    )
    try:
        return await reader.read()
    finally:
        writer.close()


def test_only_the_owner_can_read_credentials(tmp_path: Path) -> None:
    credentials = make(tmp_path / "credentials")
    assert credentials.folder.stat().st_mode & 0o777 == 0o700
    assert credentials.key.stat().st_mode & 0o777 == 0o600
    credentials.key.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by other users"):
        Credentials.load(credentials.folder)
    with pytest.raises(ConfigError, match="pdserve credentials FOLDER"):
        Credentials.load(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    ("mode", "group", "loads"),
    [(0o440, 65534, True), (0o444, 65534, False), (0o460, 65534, False), (0o440, 0, False)],
)
def test_a_secret_of_kubernetes_is_read_by_its_group(
    tmp_path: Path, mode: int, group: int, loads: bool
) -> None:
    """The kubelet writes a Secret as root, for the pod's group, behind links that it replaces at changes."""
    written = make(tmp_path / "..2026_11_23").folder
    (tmp_path / "..data").symlink_to(written.name)
    for path in written.iterdir():
        os.chown(path, 0, group)
        path.chmod(mode)
        (tmp_path / path.name).symlink_to(f"..data/{path.name}")
    if loads:
        assert Credentials.load(tmp_path) is not None
    else:
        with pytest.raises(ConfigError, match="can be read by other users"):
            Credentials.load(tmp_path)


@pytest.mark.parametrize("years", [-30, 30])
async def test_credentials_of_a_run_survive_a_corrected_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: float
) -> None:
    now = clock.unix()
    monkeypatch.setattr(clock, "unix", lambda: now + years * 365 * 24 * 3600)
    credentials = create(tmp_path / "credentials", valid=None)
    monkeypatch.undo()
    assert expiry_warning(credentials.certificate) is None
    async with greeter(credentials) as port:
        assert await greeted(port, credentials.client_context()) == b"hello"


async def test_a_process_keeps_the_credentials_it_started_with(tmp_path: Path) -> None:
    """New credentials are for processes that start later; running processes continue with theirs."""
    credentials = make(tmp_path / "credentials")
    before = credentials.authority.read_bytes()
    async with greeter(credentials) as port:
        create(credentials.folder)
        assert credentials.authority.read_bytes() != before
        assert os.listdir(tmp_path) == ["credentials"]
        assert await greeted(port, credentials.client) == b"hello"


def test_an_invalid_host_name_is_refused(tmp_path: Path) -> None:
    for host in ("", "a b", "[::1]", "10.0.0.5:2379", "a..b", "\u00fc.example.com"):
        with pytest.raises(ConfigError, match=r"--host: '.*' is no host name or IP address"):
            make_credentials(tmp_path / "new", host=[host])
    assert not list(tmp_path.iterdir())
