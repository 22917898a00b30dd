"""What both implementations promise when the server goes away, and what only a real one can do."""

import asyncio
import os
import signal
import sys
import time

import pytest

from pdserve.errors import ConfigError, RegistryUnavailable
from pdserve.ports import free_port
from pdserve.registry import connect, etcd, etcd_session
from pdserve.registry.base import Change
from pdserve.registry.etcd import EtcdRegistry
from pdserve.registry.etcd_session import EtcdSession, SessionLost
from tests.conditions import until
from tests.registry.conftest import TTL, EtcdStage, Stage
from tests.registry.following import following
from tests.servers import hung


@pytest.mark.parametrize("lose_data", [False, True])
async def test_an_outage(outage: Stage, lose_data: bool) -> None:
    async with outage.registry() as first, outage.registry() as other, following(other) as seen:
        await first.put("kept", b"1")
        await first.put("changed", b"1")
        await first.put("deleted", b"1")
        await seen.until({"kept": b"1", "changed": b"1", "deleted": b"1"})

        await outage.down()
        await until(lambda: not first.connected and not other.connected)
        await first.put("changed", b"2")
        await first.put("changed", b"3")
        await first.put("new", b"1")
        await first.put("gone again", b"1")
        await first.delete("gone again")
        await first.delete("deleted")
        for attempt in (
            first.put("settings/x", b"", leased=False),
            first.delete("settings/x"),
            first.read(""),
        ):
            with pytest.raises(RegistryUnavailable):
                await attempt
        assert seen.state == {"kept": b"1", "changed": b"1", "deleted": b"1"}
        seen.changes.clear()

        await outage.up(lose_data=lose_data)
        expected = {"kept": b"1", "changed": b"3", "new": b"1"}
        await seen.until(expected)
        await until(lambda: first.connected)  # others may see its last write before it has its answer
        assert await other.read("") == expected
        assert Change("kept", None) not in seen.changes  # nobody who lived was ever seen to vanish


async def test_a_created_key_that_is_deleted_in_an_outage(outage: Stage) -> None:
    async with outage.registry() as first, outage.registry() as other:
        assert await first.create("a", b"1")
        await outage.down()
        await until(lambda: not first.connected and not other.connected)
        await first.delete("a")
        for registry in (first, other):
            with pytest.raises(RegistryUnavailable):
                await registry.create("a", b"2")
        await outage.up()
        await until(lambda: first.connected and other.connected)
        assert await first.read("") == {}
        assert await other.create("a", b"3")


async def test_entering_without_a_server(outage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "CONNECT_WITHIN", 1.0)
    await outage.down()
    with pytest.raises(RegistryUnavailable):
        async with outage.registry():
            pass


@pytest.mark.parametrize("size", [1_700_000, 3_000_000], ids=["by etcd", "by gRPC"])
async def test_a_value_that_etcd_refuses_costs_no_other_key(etcd_stage: EtcdStage, size: int) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        assert isinstance(first, EtcdRegistry)
        await first.put("a", b"1")
        session = first._session
        assert session
        await first.put("large", bytes(size))
        with pytest.raises(RegistryUnavailable, match="refuses /ns/large"):
            await first.put("large", bytes(size), leased=False)
        await first.put("b", b"1")
        assert first._session is session
        await seen.until({"a": b"1", "b": b"1"})
        session.lost.set()
        await until(lambda: first.connected and first._session is not session)
        await first.put("large", b"no more")
        await seen.until({"a": b"1", "b": b"1", "large": b"no more"})


async def test_a_value_that_etcd_refuses_for_a_while_is_there_afterwards(
    etcd_stage: EtcdStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put, why = EtcdSession.put, ["", "too many requests"]

    async def refusing(session: EtcdSession, key: str, value: bytes, *, leased: bool) -> str:
        return why[-1] or await put(session, key, value, leased=leased)

    monkeypatch.setattr(EtcdSession, "put", refusing)
    monkeypatch.setattr(etcd, "REFUSED", 0.1)
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        await first.put("new", b"1")
        await asyncio.sleep(0.5)
        why.pop()
        await seen.until({"new": b"1"})
        why.append("full")
        await first.put("new", b"2")
        why.pop()
        await seen.until({"new": b"2"})
    refused = [line for line in caplog.messages if "new" in line]
    assert refused == [f"etcd refuses /ns/new: {why}; trying again" for why in ("too many requests", "full")]


async def test_a_revoked_lease_is_taken_anew(etcd_stage: EtcdStage) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        await first.put("a", b"1")
        await seen.until({"a": b"1"})
        assert isinstance(first, EtcdRegistry)
        assert first._session
        await first._session.revoke()
        await seen.until({})
        await seen.until({"a": b"1"})


async def test_a_created_key_that_is_lost_with_its_lease_may_be_created_by_another(
    etcd_stage: EtcdStage,
) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        assert isinstance(first, EtcdRegistry)
        assert await first.create("a", b"1")
        session = first._session
        assert session
        await session.revoke()
        await seen.until({})
        assert await other.create("a", b"2")
        await until(lambda: first.connected and first._session is not session)
        with pytest.raises(RegistryUnavailable):
            await first.put("b", b"1", leased=False, holding="a")
        assert not await first.create("a", b"3")
        await first.delete("a")
        assert await other.read("") == {"a": b"2"}
        await other.put("b", b"2", leased=False, holding="a")


async def test_a_call_that_is_given_up_leaves_no_created_key(etcd_stage: EtcdStage) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other:
        async with hung(etcd_stage.server):
            creating = asyncio.create_task(first.create("a", b"1"))
            await asyncio.sleep(0.2)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating

        async def free() -> bool:
            return await other.create("a", b"2")

        await until(free)


async def test_a_key_that_another_client_writes_without_its_lease_is_leased_again(
    etcd_stage: EtcdStage,
) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        await first.put("a", b"1")
        await seen.until({"a": b"1"})
        await other.put("a", b"1", leased=False)
        await until(lambda: len(seen.changes) == 3)  # the third one is the first process's
        await first.__aexit__(None, None, None)
        await seen.until({})


async def test_two_processes_that_claim_one_key_do_not_write_without_end(
    etcd_stage: EtcdStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "AGAIN", 0.3)
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        began = time.monotonic()
        await first.put("a", b"1")
        await other.put("a", b"2")
        await until(lambda: len(seen.changes) >= 10)
        assert time.monotonic() - began >= 3 * 0.3
        await first.delete("a")
        await seen.until({"a": b"2"})


async def test_a_killed_process_vanishes_with_its_lease(etcd_stage: EtcdStage) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from pdserve.credentials import Credentials\n"
        "from pdserve.registry.etcd import EtcdRegistry\n"
        "async def main():\n"
        "    credentials = Credentials(pathlib.Path(sys.argv[2]))\n"
        f"    async with EtcdRegistry(sys.argv[1], 'ns', {TTL}, credentials=credentials) as registry:\n"
        "        await registry.put('a', b'1')\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with etcd_stage.registry() as other, following(other) as seen:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, etcd_stage.server.url, str(etcd_stage.credentials.folder)
        )
        await seen.until({"a": b"1"})
        await asyncio.sleep(TTL + 1)
        assert seen.state == {"a": b"1"}  # it is kept alive as long as the process lives
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await seen.until({})


async def test_a_hung_server(etcd_stage: EtcdStage) -> None:
    async with etcd_stage.registry() as first, etcd_stage.registry() as other, following(other) as seen:
        await first.put("a", b"1")
        await seen.until({"a": b"1"})
        async with hung(etcd_stage.server):
            await until(lambda: not first.connected and not other.connected)
            await first.put("b", b"1")
            await asyncio.sleep(TTL)  # let the leases run out on the server
        await seen.until({"a": b"1", "b": b"1"})
        assert Change("a", None) not in seen.changes


async def test_leaving_may_be_cut_short(etcd_stage: EtcdStage) -> None:
    registry = etcd_stage.registry()
    await registry.__aenter__()
    async with hung(etcd_stage.server):
        leaving = asyncio.create_task(registry.__aexit__(None, None, None))
        await asyncio.sleep(0.2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not registry.connected


async def test_a_watch_survives_compaction(etcd_stage: EtcdStage) -> None:
    async with (
        etcd_stage.registry() as first,
        etcd_stage.registry() as other,
        following(other, "in/") as seen,
    ):
        await first.put("in/a", b"0")
        await etcd_stage.down()
        await until(lambda: not other.connected)
        await etcd_stage.up()
        await until(lambda: first.connected and other.connected)
        for number in range(30):
            await first.put("in/a", b"%d" % number)
        assert isinstance(first, EtcdRegistry)
        session = first._session
        assert session
        revision = (await session.read("/ns/", ""))[1]
        await session._client.compact(revision, physical=True)
        with pytest.raises(SessionLost, match="compacted"):
            await anext(session.watch("/ns/", [""], 2))  # as when the watch starts too long after the reading
        assert first.connected
        await first.put("in/a", b"last")
        await seen.until({"in/a": b"last"})


@pytest.mark.parametrize("turns", [0, 1, 4])
async def test_a_watch_ends_with_its_session_however_soon(
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


async def test_the_next_endpoint_is_tried(etcd_url: str, namespace: str) -> None:
    dead = f"127.0.0.1:{free_port('127.0.0.1')}"
    async with connect(f"{dead},http://{etcd_url}", namespace) as registry:
        await registry.put("a", b"1")
        assert await registry.read("") == {"a": b"1"}


@pytest.mark.parametrize("address", ["localhost", "", "host:port", ":2379"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        connect(address, "ns")
