"""Parts of faults that can be tested without a graph."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import zmq
from pdserve_bench.chaos.inputs.disk import full
from pdserve_bench.chaos.inputs.garbage import _as_frontend, _to_port, payloads, subjects_of
from pdserve_bench.chaos.inputs.weights import _other_weights, turned
from pdserve_bench.graphs.launch import small_disk
from pdserve_bench.graphs.watch import series, total

from pdserve.contract.messages import Cancel, Hello
from pdserve.contract.records import Instance, Role
from pdserve.queue.jetstream.stream import QueueNames
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until

MODEL = Path(__file__).parent.parent.parent / "pdserve/demo/model"


def test_garbage_reaches_a_zeromq_peer_as_messages() -> None:
    """Each payload arrives three times: alone, after an empty frame, and in a message of four frames."""
    everything = payloads(1)
    found: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        sender = threading.Thread(target=_to_port, args=("127.0.0.1", port, everything))
        sender.start()
        while sender.is_alive() or router.poll(500):
            if router.poll(100):
                found.append(router.recv_multipart()[1:])
    for payload in everything:
        assert [payload] in found
        assert [b"", payload] in found
        assert [payload, payload, b"", payload] in found


async def test_garbage_reaches_a_worker_as_messages_of_a_frontend() -> None:
    async with TcpStreamServer("127.0.0.1") as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        await asyncio.to_thread(_as_frontend, host, int(port), payloads(1))
        async with TcpStreamClient(server.address, "good") as good:
            await good.send(Hello("1"))
            received = server.received()
            found = [await anext(received)]
            while found[-1] != ("good", Hello("1")):
                found.append(await anext(received))
    assert found.count(("garbage", Cancel(["nobody"]))) == 2
    assert found.count(("garbage", None)) == 2
    assert server._refused == {host: 4}


def test_garbage_goes_to_the_subjects_of_the_loaded_model() -> None:
    workers = [Instance(f"decode-{number}-a", Role.DECODE, "m", fingerprint="loaded") for number in range(2)]
    names = QueueNames("ns", "m", "loaded")
    answers = [names.answers(worker.id) for worker in workers]
    assert sorted(subjects_of("ns", "m", workers)) == sorted(
        [names.requests, names.state, names.notices, *answers]
    )


async def test_a_full_disk_has_no_room_until_it_is_freed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with small_disk(folder) as mounted:
        if not mounted:
            pytest.skip("this process may not mount a file system")
        logs = folder / "logs"
        logs.mkdir()
        log = logs / "decode-0.log"
        log.write_text("before\n")

        def is_full() -> bool:
            """Whether appending fails. (Rewriting a file would reuse its space.)"""
            try:
                with (folder / "more").open("ab") as more:
                    more.write(bytes(8192))
            except OSError:
                return True
            return False

        async with full(folder):
            await until(is_full, 20)
        await until(lambda: not is_full(), 20)
        log.write_text("after\n")
    assert log.read_text() == "after\n", "logs are kept when the file system is unmounted"


def test_other_weights_have_the_same_shapes_and_the_first_are_restored(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    first = (MODEL / "model.safetensors").read_bytes()
    file.write_bytes(first)
    with _other_weights(tmp_path):
        other = file.read_bytes()
        assert len(other) == len(first)
        assert other != first
        start = 8 + int.from_bytes(first[:8], "little")
        assert json.loads(other[8:start]) == json.loads(first[8:start])
    assert file.read_bytes() == first == turned(other)


def test_metrics_are_summed_over_labels() -> None:
    page = series('# HELP x\nx_total{a="1"} 2.0\nx_total{a="2"} 3.0\nx_total_more 7.0\nx 1.0\n')
    assert total(page, "x_total") == 5.0
