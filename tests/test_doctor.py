"""The checks of `pdserve doctor`, against real servers and a real transfer."""

import subprocess
from pathlib import Path

import pytest

from pdserve import clock
from pdserve.cli import doctor
from pdserve.cli.doctor import Finding, Grade
from pdserve.config.host import InstalledVllm
from pdserve.plan.machine import GIB, Gpu, Machine
from pdserve.ports import free_port, port_holder
from pdserve.supervisor.embedded import nats_binary
from tests.conditions import until

CARD = Gpu(0, "A10", 24 * GIB)


def machine(*gpus: Gpu, build: str = "cpu", free: int = 32) -> Machine:
    return Machine(gpus, cores=2, memory=64 * GIB, available=free * GIB, build=build)


async def test_embedded_servers_are_ok() -> None:
    for finding in (await doctor.check_nats(None), await doctor.check_etcd(None)):
        assert finding.grade is Grade.OK, finding
        assert "embedded" in finding.text


async def test_configured_servers_are_ok(nats_url: str, etcd_url: str) -> None:
    for finding in (await doctor.check_nats(nats_url), await doctor.check_etcd(etcd_url)):
        assert finding.grade is Grade.OK, finding


async def test_servers_that_do_not_answer_fail() -> None:
    port = free_port("127.0.0.1")
    for finding in (
        await doctor.check_nats(f"nats://127.0.0.1:{port}"),
        await doctor.check_etcd(f"127.0.0.1:{port}"),
    ):
        assert finding.grade is Grade.FAIL
        assert str(port) in finding.text
        assert finding.advice


async def test_nats_without_jetstream_fails(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [str(nats_binary()), "--addr", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: port_holder("127.0.0.1", port) is not None)
        finding = await doctor.check_nats(f"nats://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()
    assert finding.grade is Grade.FAIL
    assert "no JetStream" in finding.text


async def test_a_transfer_is_measured() -> None:
    finding = await doctor.check_transfer()
    assert finding.grade is not Grade.FAIL, finding
    assert "GB/s" in finding.text


@pytest.mark.parametrize(
    ("finding", "grade"),
    [
        (doctor.check_gpus(machine()), Grade.OK),
        (doctor.check_gpus(machine(CARD, build="cuda")), Grade.OK),
        (doctor.check_gpus(machine(CARD, build="cpu")), Grade.WARN),
        (doctor.check_vllm(InstalledVllm()), Grade.FAIL),
        (doctor.check_memory(machine(free=32)), Grade.OK),
        (doctor.check_memory(machine(free=4)), Grade.WARN),
        (doctor.check_python(), Grade.OK),
    ],
)
def test_grades_of_the_machine(finding: Finding, grade: Grade) -> None:
    assert finding.grade is grade
    assert (grade is Grade.OK) == (not finding.advice)


async def test_a_wrong_clock_is_a_warning(nats_url: str) -> None:
    right = await doctor.check_clock(nats_url)
    assert right is not None
    assert right.grade is Grade.OK, right
    with clock.skewed(-40.0):
        wrong = await doctor.check_clock(nats_url)
    assert wrong is not None
    assert wrong.grade is Grade.WARN
    assert "40.0 s behind" in wrong.text
    assert await doctor.check_clock(None) is None
    assert await doctor.check_clock("nats://127.0.0.1:1") is None
