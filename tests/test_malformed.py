"""Messages that cannot be read, on every port and subject, are logged and skipped, without further effect. For
streams, `tests/stream/test_tcp.py` tests the same."""

import asyncio

import msgspec
import nats
import pytest
import zmq

from pdserve.contract.messages import Hello, PrefillCancel, PrefillFailed, encode
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import QueueNames
from pdserve.registry.etcd import EtcdRegistry
from pdserve.registry.view import RegistryView
from tests.conditions import until
from tests.queue.requests import ids, publish

NOT_UTF8 = encode(Hello("abcd")).replace(b"abcd", b"\xff\xfe\xff\xfe")
TOO_DEEP = b"\x91" * 100_000
GARBAGE = [
    b"",
    b"\xc1",
    b"\xff" * 100,
    b"garbage",
    NOT_UTF8,
    TOO_DEEP,
    encode({"type": "Submit"}),
    encode([1]),
]


async def test_malformed_keys_and_values_in_etcd_are_skipped(
    etcd_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with EtcdRegistry(etcd_url, namespace) as registry, EtcdRegistry(etcd_url, namespace) as other:
        await _put_raw(other, f"/{namespace}/instances/decode/".encode() + b"\xff\xfe", b"x")
        async with RegistryView(registry) as view:
            await other.put("instances/decode/a", encode_record(Instance("a", Role.DECODE)))
            for number, garbage in enumerate([*GARBAGE, b'{"id":"\xff","role":"decode"}', b"[" * 100_000]):
                for kind in ("instances/decode", "models/m", "settings", "nothing"):
                    await other.put(f"{kind}/garbage-{number}", garbage)
            await _put_raw(other, f"/{namespace}/settings/".encode() + b"\xff", b"x")
            await other.put("instances/decode/b", encode_record(Instance("b", Role.DECODE)))
            await until(lambda: [instance.id for instance in view.instances()] == ["a", "b"])
            assert view.cards() == {}
            await other.put("instances/decode/a", b"now broken")
            await until(lambda: [instance.id for instance in view.instances()] == ["b"])
        async with RegistryView(registry) as late:
            assert [instance.id for instance in late.instances()] == ["b"]
    assert "registry: skipped instances/decode/garbage-0" in caplog.text


async def _put_raw(registry: EtcdRegistry, key: bytes, value: bytes) -> None:
    session = registry._session
    assert session is not None
    await session._client.put(key, value, lease=session.lease)


async def test_malformed_messages_on_nats_are_skipped(
    nats_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = QueueNames(namespace, "m")
    client = await nats.connect(nats_url)
    async with (
        JetStreamQueue(nats_url, namespace, "m") as decode,
        JetStreamQueue(nats_url, namespace, "m") as prefill,
    ):
        answers, cancels = decode.answers("decode-0"), prefill.notices()
        reading = [asyncio.ensure_future(anext(answers)), asyncio.ensure_future(anext(cancels))]
        for queue in (decode, prefill):
            await queue._connection.subscribe()
            await queue._connection.client().flush()
            await queue._connection.client().flush()  # now the server has the subscriptions
        for garbage in GARBAGE:
            for subject in (names.requests, names.state, names.notices, names.answers("decode-0")):
                await client.publish(subject, garbage)
        await client.flush()
        await client.flush()  # the first PING overtakes buffered messages
        await publish(decode, "a")
        pulled = await prefill.pull(1, 30)
        assert ids(pulled) == ["a"]
        await prefill.answer("decode-0", PrefillFailed("a", "x"))
        await decode.cancel(["b"])
        assert await asyncio.gather(*reading) == [PrefillFailed("a", "x"), PrefillCancel(["b"])]
        await until(lambda: decode.depth == 0)
    await client.close()
    for what in ("a queue state", "prefill request", ".answers.decode-0:", ".notices:"):
        assert what in caplog.text


async def test_malformed_cache_events_are_skipped() -> None:
    from pdserve.engine.vllm import api  # vLLM takes seconds to import
    from pdserve.engine.vllm.cache import CacheMirror

    stored = api.BlockStored([7], None, [1], 1, None, None, None)
    async with CacheMirror() as mirror:
        publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(mirror.endpoint)
        mirror.follow()
        event = msgspec.msgpack.encode(api.KVEventBatch(0.0, [stored]))

        def seen() -> bool:
            for garbage in GARBAGE:
                publisher.send_multipart([b"", b"\0" * 8, garbage])
            publisher.send(TOO_DEEP)
            publisher.send_multipart([b"", b"\0" * 8, event])
            return 7 in mirror._blocks

        await until(seen)
        publisher.close()
