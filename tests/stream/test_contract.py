"""The contract of streams, plain and with TLS (`pdserve/stream/__init__.py`)."""

import asyncio

import pytest

from pdserve.contract.messages import Cancel, Failed, Hello, Outputs, Submit, ToFrontend
from pdserve.stream.framing import MAX_MESSAGE
from pdserve.stream.tcp import TcpStreamServer
from pdserve.util.errors import PeerGone, ProtocolError
from tests.conditions import until
from tests.stream.conftest import Wire


async def test_messages_keep_their_order_both_ways(wire: Wire) -> None:
    """This includes messages that arrive before `deliver` is called."""
    taken: list[ToFrontend] = []
    async with wire.server() as server, wire.client(server.address, "frontend-0-a") as client:
        received = server.received()
        for number in range(200):
            await client.send(Cancel([str(number)]))
        for number in range(200):
            assert await anext(received) == ("frontend-0-a", Cancel([str(number)]))
        for number in range(100):
            await server.send("frontend-0-a", Outputs([b"%d" % number]))
        await asyncio.sleep(0.1)
        delivery = asyncio.create_task(client.deliver(taken.append))
        for number in range(100, 200):
            await server.send("frontend-0-a", Outputs([b"%d" % number]))
        await until(lambda: len(taken) == 200)
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery
    assert taken == [Outputs([b"%d" % number]) for number in range(200)]


async def test_a_message_over_the_bound_is_refused_before_it_is_sent(wire: Wire) -> None:
    """Otherwise the other side would end the connection."""
    async with wire.server() as server, wire.client(server.address, "f") as client:
        at_server, at_client = server.received(), client.received()
        await client.send(Hello("1"))
        await anext(at_server)
        with pytest.raises(ProtocolError, match="more than 67108864"):
            await client.send(Submit("r", [1], 1.0, [bytes(MAX_MESSAGE)]))
        with pytest.raises(ProtocolError, match="more than 67108864"):
            await server.send("f", Outputs([bytes(MAX_MESSAGE)]))
        await client.send(Cancel(["a"]))
        await server.send("f", Outputs([b"1"]))
        assert await anext(at_server) == ("f", Cancel(["a"]))
        assert await anext(at_client) == Outputs([b"1"])


@pytest.mark.parametrize(
    "nowhere", ["", "garbage", "tcp://", "tcp://h", "tcp://h:x", "tcp://h:99999", "http://h:1"]
)
async def test_a_missing_peer_raises_peer_gone(wire: Wire, nowhere: str) -> None:
    async with wire.server() as server:
        address = server.address
        with pytest.raises(PeerGone):
            await server.send("unknown", Failed("r", ""))
    for wrong in (address, nowhere):
        with pytest.raises(PeerGone):
            async with wire.client(wrong, "f"):
                pass


async def test_the_client_learns_after_the_last_message_that_the_server_left(wire: Wire) -> None:
    server, taken = wire.server(), list[ToFrontend]()
    await server.__aenter__()
    async with wire.client(server.address, "f") as reading, wire.client(server.address, "g") as delivering:
        received = server.received()
        for client in (reading, delivering):
            await client.send(Hello("1"))
        assert {await anext(received), await anext(received)} == {("f", Hello("1")), ("g", Hello("1"))}
        delivery = asyncio.create_task(delivering.deliver(taken.append))
        for name in ("f", "g"):
            await server.send(name, Failed("r", "last words"))
        await server.__aexit__(None, None, None)
        messages = reading.received()
        assert await anext(messages) == Failed("r", "last words")
        with pytest.raises(PeerGone):
            await anext(messages)
        with pytest.raises(PeerGone):
            await delivery
        assert taken == [Failed("r", "last words")]
        with pytest.raises(PeerGone):
            await reading.send(Hello("2"))


async def test_a_second_connection_of_a_name_replaces_the_first(wire: Wire) -> None:
    async with wire.server() as server:
        received = server.received()
        async with wire.client(server.address, "f") as first:
            await first.send(Hello("1"))
            assert await anext(received) == ("f", Hello("1"))
            connecting = asyncio.create_task(_say_hello(wire, server))
            assert await anext(received) == ("f", None)
            assert await anext(received) == ("f", Hello("2"))
            with pytest.raises(PeerGone):
                await anext(first.received())
            await connecting


async def _say_hello(wire: Wire, server: TcpStreamServer) -> None:
    async with wire.client(server.address, "f") as second:
        await second.send(Hello("2"))


async def test_a_frontend_that_left_connects_again(wire: Wire) -> None:
    async with wire.server() as server:
        received = server.received()
        for number in range(3):
            async with wire.client(server.address, "f") as client:
                await client.send(Hello(str(number)))
                assert await anext(received) == ("f", Hello(str(number)))
                await server.send("f", Failed("r", str(number)))
                assert await anext(client.received()) == Failed("r", str(number))
            assert await anext(received) == ("f", None)
            with pytest.raises(PeerGone):
                await server.send("f", Failed("r", ""))
