"""`pdserve decode|prefill` without `serve`, as on another host: starting and stopping."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve import registry
from pdserve.contract.records import Role
from pdserve.process.signals import SAME_STOP
from pdserve.registry.view import RegistryView
from pdserve.util.net import free_port
from tests.conditions import until
from tests.decode.graph import FrontendStream
from tests.servers import etcd_server, restart
from tests.terminal import Terminal

YAML = """
Common: {{model: demo, block-size: 32, max-model-len: 4096}}
Graph: {{namespace: {namespace}, nats: "{nats}", etcd: "{etcd}"}}
Frontend: {{served_model_name: demo, port: {port}}}
VllmWorker: {{engine: sim, remote-prefill: true, common-configs: [model, block-size, max-model-len]}}
PrefillWorker: {{engine: sim, common-configs: [model, block-size, max-model-len]}}
"""
TOKENS = 300
"""a simulated engine takes 1.5 s for them"""


class Alone:
    def __init__(self, folder: Path, nats: str, etcd: str, namespace: str) -> None:
        self.etcd, self.namespace = etcd, namespace
        self.file = folder / "graph.yaml"
        port = free_port("127.0.0.1")
        self.file.write_text(YAML.format(nats=nats, etcd=etcd, namespace=namespace, port=port))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        self.env = {**clean, "PDSERVE_STATE_DIR": str(folder / "state")}

    def command(self, role: Role) -> list[str]:
        return [sys.executable, "-m", "pdserve", role.value, "-f", str(self.file)]

    def another(self, model: str) -> list[str]:
        """Return the command of a second model's decode worker on the same servers (docs/hosts.md)."""
        file = self.file.with_name(f"{model}.yaml")
        text = self.file.read_text().replace("served_model_name: demo", f"served_model_name: {model}")
        file.write_text(text.replace("Graph: {", f"Graph: {{kv-port: {free_port('127.0.0.1')}, "))
        return [sys.executable, "-m", "pdserve", Role.DECODE.value, "-f", str(file)]

    @asynccontextmanager
    async def view(self) -> AsyncIterator[RegistryView]:
        async with (
            registry.connect(self.etcd, self.namespace) as connection,
            RegistryView(connection) as view,
        ):
            yield view


@pytest.fixture
def alone(tmp_path: Path, nats_url: str, etcd_url: str, namespace: str) -> Alone:
    return Alone(tmp_path, nats_url, etcd_url, namespace)


async def test_the_second_ctrl_c_ends_a_frontend_at_once(alone: Alone) -> None:
    """Meanwhile, the frontend imports vLLM in a thread that cannot be stopped, and a client is connected."""
    async with alone.view() as view:
        with Terminal(alone.command(Role.FRONTEND), alone.env) as terminal:
            await until(lambda: bool(view.instances(Role.FRONTEND)), 90)
            (instance,) = view.instances(Role.FRONTEND)
            host, _, port = instance.address.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                "POST /v1/completions HTTP/1.1",
                "host: localhost",
                "content-length: 100",
                "expect: 100-continue",
                "",
                "",
            )
            writer.write("\r\n".join(head).encode())
            assert b" 100 " in await reader.readline()  # the frontend waits for the body
            terminal.type("\x03")
            await asyncio.to_thread(terminal.until, "running requests may finish")
            await asyncio.sleep(SAME_STOP)
            terminal.type("\x03")
            # at once, though the client has 30 s to begin its body
            await asyncio.to_thread(terminal.until, "the exit code is 0", 20)
            writer.close()
        assert "second signal" in terminal.text


async def test_a_role_waits_for_etcd(tmp_path: Path, nats_url: str, namespace: str) -> None:
    async with etcd_server(tmp_path) as etcd:
        await etcd.stop()
        alone = Alone(tmp_path, nats_url, etcd.url, namespace)
        for back in (False, True):
            with Terminal(alone.command(Role.DECODE), alone.env) as terminal:
                await asyncio.to_thread(terminal.until, f"no etcd answers at {etcd.url}; waiting for it")
                if back:
                    await restart(etcd)
                    async with alone.view() as view:
                        await until(lambda: bool(view.instances(Role.DECODE)))
                terminal.type("\x03")
                await asyncio.to_thread(terminal.until, "the exit code is 0")
            assert "Traceback" not in terminal.text


async def test_ctrl_c_lets_the_requests_of_a_worker_finish(alone: Alone) -> None:
    """Before, a second worker of the same model and index is refused."""
    role = Role.DECODE
    command = [*alone.command(role), "--index", "0"]
    async with alone.view() as view:
        with Terminal(command, alone.env) as first:
            await until(lambda: bool(view.instances(role)), 90)
            with Terminal(command, alone.env) as second:
                await asyncio.to_thread(second.until, "the exit code is 2")
            assert f"{role.value}-0 of demo already runs on this host" in second.text
            assert "Traceback" not in second.text
            (instance,) = view.instances(role)
            with Terminal([*alone.another("other"), "--index", "0"], alone.env) as third:
                await until(lambda: {each.model for each in view.instances(role)} == {"demo", "other"}, 90)
                third.type("\x03")
                await asyncio.to_thread(third.until, "the exit code is 0")
            async with FrontendStream(instance.address) as frontend:
                request = await frontend.stream([3, 4, 5], TOKENS)
                first.type("\x03")
                await until(lambda: frontend.answered[request].finished)
                frontend.answered[request].check()
            await asyncio.to_thread(first.until, "the exit code is 0")
            assert "draining: 1 requests to finish" in first.text


async def test_a_signal_ends_a_starting_role_with_exit_code_0(alone: Alone) -> None:
    process = await asyncio.create_subprocess_exec(
        *alone.command(Role.FRONTEND), env=alone.env, stderr=asyncio.subprocess.PIPE
    )
    await until(lambda: any(map(_has_handlers, _children(process.pid))))
    process.send_signal(signal.SIGTERM)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, said
    assert b"stopped while starting" in said


def _children(pid: int) -> list[int]:
    """Return the pids of this process's children: the role."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _has_handlers(pid: int) -> bool:
    """Whether the role has set its signal handlers, of which SIGHUP's is the last."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGHUP - 1) & 1)
