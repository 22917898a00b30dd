"""The registry's contract in an outage, for both implementations, and outages of a real etcd."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from pdserve.registry import connect, etcd, etcd_session
from pdserve.registry.base import Change
from pdserve.registry.etcd_session import EtcdSession, SessionLost
from pdserve.util.errors import ConfigError, RegistryUnavailable
from tests.conditions import until
from tests.registry.conftest import TTL, EtcdStage, Outage, SharedEtcd, following
from tests.servers import hung


@pytest.mark.parametrize("lose_data", [False, True])
async def test_keys_survive_an_outage(
    outage: Outage, lose_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "CONNECT_TIMEOUT", 1.0)
    async with outage.registry() as first, outage.registry() as other, following(other) as seen:
        for key in ("kept", "changed", "deleted"):
            await first.put(key, b"1")
        assert await first.create("created", b"1")
        await seen.until(before := dict.fromkeys(("kept", "changed", "deleted", "created"), b"1"))

        await outage.down()
        await until(lambda: not first.connected and not other.connected)
        with pytest.raises(RegistryUnavailable):
            async with outage.registry():
                pass
        await first.put("changed", b"2")
        await first.put("changed", b"3")
        await first.put("new", b"1")
        await first.put("deleted again", b"1")
        for key in ("deleted again", "deleted", "created"):
            await first.delete(key)
        for attempt in (
            first.put("settings/x", b"", leased=False),
            first.delete("settings/x"),
            first.read(""),
            first.create("created", b"2"),
            other.create("created", b"2"),
        ):
            with pytest.raises(RegistryUnavailable):
                await attempt
        assert seen.state == before
        seen.changes.clear()

        await outage.up(lose_data=lose_data)
        expected = {"kept": b"1", "changed": b"3", "new": b"1"}
        await seen.until(expected)
        await until(lambda: first.connected)  # etcd may not have answered the last write yet
        assert await other.read("") == expected
        assert Change("kept", None) not in seen.changes  # no kept key was seen to vanish
        assert await other.create("created", b"3")


@pytest.mark.parametrize("size", [1_700_000, 3_000_000], ids=["by etcd", "by gRPC"])
async def test_a_refused_value_affects_no_other_key(shared: SharedEtcd, size: int) -> None:
    async with shared.registry() as first, shared.registry() as other, following(other) as seen:
        await first.put("a", b"1")
        session = first._session
        assert session
        await first.put("large", bytes(size))
        with pytest.raises(RegistryUnavailable, match=f"refused /{shared.namespace}/large"):
            await first.put("large", bytes(size), leased=False)
        await first.put("b", b"1")
        assert first._session is session
        await seen.until({"a": b"1", "b": b"1"})
        session.lost.set()
        await until(lambda: first.connected and first._session is not session)
        await first.put("large", b"no more")
        await seen.until({"a": b"1", "b": b"1", "large": b"no more"})


async def test_a_value_that_etcd_refused_is_written_later(
    shared: SharedEtcd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put, why, refused = EtcdSession.put, ["", "too many requests"], 0

    async def refusing(session: EtcdSession, key: str, value: bytes, *, leased: bool) -> str:
        nonlocal refused
        refused += bool(why[-1])
        return why[-1] or await put(session, key, value, leased=leased)

    monkeypatch.setattr(EtcdSession, "put", refusing)
    monkeypatch.setattr(etcd, "REFUSED_INTERVAL", 0.05)
    async with shared.registry() as first, shared.registry() as other, following(other) as seen:
        await first.put("new", b"1")
        await until(lambda: refused > 3)
        why.pop()
        await seen.until({"new": b"1"})
        why.append("full")
        await first.put("new", b"2")
        why.pop()
        await seen.until({"new": b"2"})
    key = f"/{shared.namespace}/new"
    said = [line for line in caplog.messages if "new" in line]
    assert said == [f"etcd refused {key}: {reason}; retrying" for reason in ("too many requests", "full")]


async def test_a_revoked_lease_is_replaced(shared: SharedEtcd) -> None:
    """Another process may meanwhile create a key that was lost with the lease."""
    async with shared.registry() as first, shared.registry() as other, following(other) as seen:
        await first.put("kept", b"1")
        assert await first.create("a", b"1")
        await seen.until({"kept": b"1", "a": b"1"})
        session = first._session
        assert session
        await session.revoke()
        await seen.until({})
        assert await other.create("a", b"2")
        await seen.until({"kept": b"1", "a": b"2"})
        await until(lambda: first.connected and first._session is not session)
        with pytest.raises(RegistryUnavailable):
            await first.put("b", b"1", leased=False, holding="a")
        assert not await first.create("a", b"3")
        await first.delete("a")
        assert await other.read("") == {"kept": b"1", "a": b"2"}
        await other.put("b", b"2", leased=False, holding="a")
        await other.delete("b")


async def test_a_key_that_loses_its_lease_is_leased_again(shared: SharedEtcd) -> None:
    async with shared.registry() as first, shared.registry() as other, following(other) as seen:
        await first.put("a", b"1")
        await seen.until({"a": b"1"})
        await other.put("a", b"1", leased=False)
        await until(lambda: len(seen.changes) == 3)  # `first` writes the third change, with its lease
        await first.__aexit__(None, None, None)
        await seen.until({})


async def test_two_processes_that_claim_a_key_pause_between_writes(
    shared: SharedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "RESTORE_INTERVAL", 0.1)
    async with shared.registry() as first, shared.registry() as other, following(other) as seen:
        began = time.monotonic()
        await first.put("a", b"1")
        await other.put("a", b"2")
        await until(lambda: len(seen.changes) >= 10)
        assert time.monotonic() - began >= 3 * 0.1
        await first.delete("a")
        await seen.until({"a": b"2"})


async def test_a_killed_process_vanishes_when_its_lease_ends(shared: SharedEtcd) -> None:
    script = (
        "import asyncio, sys\n"
        "from pdserve.registry.etcd import EtcdRegistry\n"
        "async def main():\n"
        f"    async with EtcdRegistry(sys.argv[1], sys.argv[2], {TTL}) as registry:\n"
        "        await registry.put('a', b'1')\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with shared.registry() as other, following(other) as seen:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, shared.url, shared.namespace
        )
        await seen.until({"a": b"1"})
        await asyncio.sleep(TTL + 1)
        assert seen.state == {"a": b"1"}  # the lease is kept alive while the process lives
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await seen.until({})


async def test_a_hung_server_loses_no_process(etcd_stage: EtcdStage) -> None:
    """A cancelled call leaves no created key. Leaving the registry can be cancelled."""
    leaving = etcd_stage.registry()
    await leaving.__aenter__()

    async def given_up(call: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(call)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def free() -> bool:
        return await other.create("created", b"2")

    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        async with hung(etcd_stage.server):
            await given_up(first.create("created", b"1"))
        await until(free)
        await first.put("a", b"1")
        await seen.until({"a": b"1", "created": b"2"})
        async with hung(etcd_stage.server):
            await given_up(leaving.__aexit__(None, None, None))
            assert not leaving.connected
            await until(lambda: not first.connected and not other.connected)
            await first.put("b", b"1")
            await asyncio.sleep(TTL)  # let the leases run out on the server
        await until(lambda: {"a": b"1", "b": b"1"}.items() <= (seen.state or {}).items())
        assert Change("a", None) not in seen.changes


async def test_a_watch_survives_compaction(shared: SharedEtcd) -> None:
    async with shared.registry() as first, shared.registry() as other, following(other, "in/") as seen:
        for number in range(30):
            await first.put("in/a", b"%d" % number)
        session = first._session
        assert session
        root = f"/{shared.namespace}/"
        revision = (await session.read(root, ""))[1]
        await session._client.compact(revision, physical=True)
        with pytest.raises(SessionLost, match="compacted"):
            await anext(session.watch(root, [""], 2))  # as if the watch began too long after the read
        assert first.connected
        await first.put("in/a", b"last")
        await seen.until({"in/a": b"last"})


@pytest.mark.parametrize("turns", [0, 1, 4])
async def test_a_watch_ends_with_its_session_however_early(
    etcd_url: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_session, "CALL_TIMEOUT", 0.5)
    host, _, port = etcd_url.rpartition(":")
    session = EtcdSession((host, int(port)), TTL)
    await session.open(0)
    watch = asyncio.ensure_future(anext(session.watch("/ns/", [""], 1)))
    for _ in range(turns):
        await asyncio.sleep(0)
    await session.close()
    with pytest.raises(SessionLost):
        await watch


def test_invalid_addresses_are_refused() -> None:
    for address in ("localhost", "", "host:port", ":2379"):
        with pytest.raises(ConfigError, match="is not host:port"):
            connect(address, "ns")
