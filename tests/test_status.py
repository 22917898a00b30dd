import os

import pytest
from rich.console import Console

from pdserve.cli.find import GraphAddress
from pdserve.cli.live import read_state
from pdserve.cli.status import render
from pdserve.records import Instance, Role, encode_record
from pdserve.registry import keys
from pdserve.registry.memory import MemoryRegistry, MemoryServer
from pdserve.registry.view import RegistryView


@pytest.mark.parametrize(("host", "known"), [("127.0.0.1", True), ("192.0.2.7", False)])
async def test_how_long_a_process_runs_is_only_known_on_its_machine(host: str, known: bool) -> None:
    """Another machine has other processes of the same pids."""
    instance = Instance("decode-0-ab12cd34", Role.DECODE, host=host, pid=os.getpid())
    async with MemoryRegistry(MemoryServer()) as registry:
        await registry.put(keys.instance(instance), encode_record(instance))
        async with RegistryView(registry) as view:
            console = Console(width=200)
            with console.capture() as shown:
                console.print(render(await read_state(view), GraphAddress("etcd", "pdserve")))
    row = next(line for line in shown.get().splitlines() if instance.id in line)
    assert (" s " in row or " min " in row) == known
