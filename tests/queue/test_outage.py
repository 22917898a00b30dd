"""The queue's contract in an outage, for both implementations, and outages of a real NATS server."""

import asyncio
import time
from pathlib import Path

import pytest

from pdserve.contract.messages import PrefillCancel, PrefillFailed, PrefillLoad
from pdserve.queue import connect
from pdserve.queue.depth import Puller
from pdserve.queue.jetstream import connection
from pdserve.queue.jetstream.connection import NatsConnection, SubjectMessages
from pdserve.supervisor.servers.embedded import EmbeddedNats
from pdserve.util.errors import ConfigError, QueueUnavailable
from pdserve.util.net import free_port
from tests.conditions import holds, until
from tests.full_disk import small_disk
from tests.queue.conftest import NatsOutage, Outage
from tests.queue.requests import ids, publish, request
from tests.queue.test_restored_stream import by_hand
from tests.servers import hung, nats_server, restart


@pytest.mark.parametrize(
    ("outage", "lose_data"),
    [("memory_outage", False), ("memory_outage", True), ("nats_outage", True)],
    indirect=["outage"],
)
async def test_a_queue_works_again_after_an_outage(outage: Outage, lose_data: bool) -> None:
    decode, prefill = await outage.queues(), await outage.queues()
    answers, cancels = decode.answers("decode-0-a"), prefill.notices()
    await publish(decode, "held", "queued")
    (held,) = await prefill.pull(1, 1)

    await outage.down()
    await until(lambda: not decode.connected and not prefill.connected)
    for attempt in (
        decode.publish(request("lost")),
        decode.cancel(["lost"]),
        prefill.pull(1, 1),
        prefill.answer("decode-0-a", PrefillFailed("held", "x")),
        held.in_progress(),
    ):
        with pytest.raises(QueueUnavailable):
            await attempt
    await held.ack()

    await outage.up(lose_data=lose_data)
    await until(lambda: decode.connected and prefill.connected)
    lost = lose_data or isinstance(outage, NatsOutage)  # NATS keeps the queue in memory
    assert decode.losses == int(lost)
    assert decode.depth == (0 if lost else 1)
    await publish(decode, "new")
    expected = ["new"] if lost else ["queued", "new"]
    assert ids(await prefill.pull(5, 1)) == expected
    await prefill.answer("decode-0-a", PrefillFailed("new", "x"))
    assert (await anext(answers)).request_id == "new"
    await decode.cancel(["c"])
    assert await anext(cancels) == PrefillCancel(["c"])
    await until(lambda: decode.depth == 0)


async def test_an_ack_from_before_a_data_loss_acks_no_later_request(nats_outage: NatsOutage) -> None:
    """Both requests have the same sequence number, because the server's stream is new."""
    decode, first, other = [await nats_outage.queues() for _ in range(3)]
    await publish(decode, "old")
    (held,) = await first.pull(1, 1)
    await nats_outage.down()
    await until(lambda: not first.connected)
    await nats_outage.up(lose_data=False)
    await until(lambda: decode.connected and first.connected and other.connected)
    await publish(decode, "new")
    (given,) = await other.pull(1, 1)
    await held.give_back()
    await held.in_progress()
    await held.ack()
    await given.give_back()
    assert ids(await first.pull(1, 2)) == ["new"]


async def test_a_report_after_a_data_loss_leaves_out_the_old_streams_state(
    nats_outage: NatsOutage,
) -> None:
    """The worker reports without a pull, because its first prompts after the loss are addressed."""
    decode, prefill = await nats_outage.queues(), await nats_outage.queues()
    worker = Puller("prefill-0", lambda: PrefillLoad(5000, 0.001))
    await publish(decode, "a", "b", "c")
    await prefill.pull(3, 1, worker)
    await until(lambda: "prefill-0" in decode.loads)
    await nats_outage.down()
    await until(lambda: not decode.connected and not prefill.connected)
    await nats_outage.up(lose_data=True)
    await until(lambda: decode.connected and prefill.connected)
    heard = decode.loads["prefill-0"][1]
    worker = Puller("prefill-0", lambda: PrefillLoad(9000, 0.001))
    prefill.load_changed(worker)
    await until(lambda: decode.loads["prefill-0"][1] > heard)
    await publish(decode, "new")
    assert decode.depth == 1
    await holds(lambda: (decode.losses, prefill.losses, decode.depth) == (1, 1, 1), 1.0)


async def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        async with (
            nats_server(disk.path) as server,
            connect(server.url, "ns", "m") as decode,
            connect(server.url, "ns", "m") as prefill,
        ):
            await publish(decode, "full-1", "full-2")
            disk.free()
            await publish(decode, "free")
            disk.fill()
            await publish(decode, "full-again")
            assert ids(await prefill.pull(9, 1)) == ["full-1", "full-2", "free", "full-again"]
            disk.free()
            await restart(server)
            await until(lambda: decode.connected and prefill.connected)
            await publish(decode, "restarted")
            assert ids(await prefill.pull(9, 1)) == ["restarted"]


async def test_a_pull_ends_when_the_server_dies(outage: Outage) -> None:
    prefill = await outage.queues()
    pulling = asyncio.create_task(prefill.pull(1, 60))
    await asyncio.wait({pulling}, timeout=0.3)
    await outage.down()
    with pytest.raises(QueueUnavailable):
        await pulling


async def test_a_hung_server_counts_as_disconnected(
    nats_outage: NatsOutage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(connection, "PING_TIMEOUT", 1)
    decode, prefill = await nats_outage.queues(), await nats_outage.queues()
    cancels = prefill.notices()
    await prefill.pull(1, 0)
    async with hung(nats_outage.server):
        with pytest.raises(QueueUnavailable):
            await publish(decode, "unsure")
        await until(lambda: not decode.connected)
        with pytest.raises(QueueUnavailable):
            await publish(decode, "at once")
    assert await anext(cancels) == PrefillCancel(["unsure"]), "withdrawn: it was not confirmed"
    await until(lambda: decode.connected and prefill.connected)
    await publish(decode, "new")
    pulled: list[str] = []
    while "new" not in pulled:
        pulled += ids(await prefill.pull(5, 1))
    # "unsure" may come, because it reached the hung server's socket; "at once" was refused
    assert "at once" not in pulled


async def test_a_call_to_a_hung_server_can_be_cancelled(nats_outage: NatsOutage) -> None:
    """nats-py swallows a cancellation while it waits for room in its buffer."""
    server = nats_outage.server
    async with NatsConnection(server.url, nats_outage.tls, "nothing happens") as connected, hung(server):
        started = time.monotonic()
        while time.monotonic() - started < 0.5:
            started = time.monotonic()
            publishing = asyncio.create_task(connected.publish("a", b"x" * 1_000_000))
            await asyncio.wait({publishing}, timeout=0.5)
        publishing.cancel()
        await asyncio.wait({publishing})
        assert publishing.cancelled()


async def test_a_request_published_after_the_stream_was_deleted_is_stored(
    nats_url: str, namespace: str
) -> None:
    """The stream is recreated at once, not at the next check."""
    async with connect(nats_url, namespace, "m") as decode, connect(nats_url, namespace, "m") as prefill:
        for name in ("a", "b", "c"):
            await publish(decode, name)
            assert ids(await prefill.pull(1, 2)) == [name]
            async with by_hand(nats_url, namespace) as (js, stream):
                await js.delete_stream(stream)
            if name == "b":
                assert await prefill.pull(1, 0.1) == []


async def test_a_queue_connects_to_a_server_that_starts_later(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    async with connect(f"nats://127.0.0.1:{port}", "ns", "m") as queue:
        assert not queue.connected
        with pytest.raises(QueueUnavailable):
            await publish(queue, "a")
        async with nats_server(tmp_path, port):
            await until(lambda: queue.connected)
            await publish(queue, "a")
            assert ids(await queue.pull(1, 1)) == ["a"]


class _Plain(EmbeddedNats):
    def command(self) -> list[str]:
        return [argument for argument in super().command() if argument != "--jetstream"]

    async def answers(self) -> bool:
        return not await super().answers()


async def test_nats_without_jetstream_is_refused_with_its_address(tmp_path: Path) -> None:
    async with _Plain(tmp_path) as server:
        with pytest.raises(ConfigError, match=rf"{server.url} runs without JetStream"):
            async with connect(server.url, "ns", "m"):
                pass


async def test_a_late_pong_does_not_end_reading(nats_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A pong is late after a pause of this process or of the server."""
    inbox = SubjectMessages("pdserve.test.late")
    async with NatsConnection(nats_url, None, "nothing happens") as connected:
        client = connected.client()
        connected.listen(inbox.subject, inbox.put)
        await connected.flush_subscriptions()
        ping = asyncio.ensure_future(client.flush())
        await asyncio.sleep(0)  # not longer, because the pong comes within a millisecond
        assert client._pongs
        ping.cancel()
        await until(lambda: not client._pongs)
        await connected.publish(inbox.subject, b"after it")
        assert (await asyncio.wait_for(inbox.next(), 30)).data == b"after it"
        assert connected.client() is client
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_no_longer_reads_is_replaced(nats_url: str) -> None:
    async with NatsConnection(nats_url, None, "nothing happens") as connected:
        client = connected.client()
        assert client._reading_task is not None
        client._reading_task.cancel()
        await until(lambda: connected.connected and connected.client() is not client)
