"""The rendered pods run for real, in namespaces (`kubelet.py`), with simulated engines: installed, asked, upgraded and
scaled under load, with a node that is lost and a probe that fails. No request is lost, and no token is wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pdserve_bench.chaos.judge import Judgement
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.questions import PromptLengths, computed, endless

from pdserve.credentials import Credentials
from pdserve.engine.sim.model import SimModel
from tests.deploy.helm import Rendering, render
from tests.deploy.kubelet import Cluster, cluster
from tests.network import hosts

HEADERS = {"Authorization": "Bearer sk-of-the-tests-of-the-chart"}
YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096}
Frontend: {served_model_name: demo, port: 8000}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 100
  ServiceArgs: {workers: 2}
  common-configs: [model, block-size, max-model-len]
PrefillWorker: {engine: sim, common-configs: [model, block-size, max-model-len]}
Security: {allow: [plain-http]}
Graph: {drain-timeout: 20}
"""
CLIENTS = 4
ANSWERED_MEANWHILE = 12
"""requests after each change that must be answered"""


@pytest.mark.timeout(600)
def test_nothing_is_lost_while_pods_come_and_go(tmp_path: Path, credentials: Credentials) -> None:
    secrets = {
        "graph-certificates": {path.name: path.read_text() for path in credentials.folder.iterdir()},
        "keys": {"api-keys": HEADERS["Authorization"].split()[1]},
    }
    with hosts(tmp_path) as net:

        async def story() -> None:
            async with cluster(net, tmp_path, secrets) as pods:
                await _installed(pods)
                async with _load(pods) as load:
                    for change in (_upgraded, _scaled, _node_lost, _probe_failed):
                        await change(pods)
                        await _answered(load)
                seen = load.seen("", 0.0)
                assert [str(each.trace) for each in seen if each.result is not Judgement.OK] == []
                assert {attempt.prefill for attempt in load.done} == {"local", "remote"}
                assert pods.faults == []

        asyncio.run(story())


async def _answered(load: JudgedLoad) -> None:
    enough = len(load.done) + ANSWERED_MEANWHILE
    await load.until(lambda _: len(load.done) >= enough)


def _rendered(pods: Cluster, text: str) -> Rendering:
    """HOME is kept: what a frontend finds out about the model takes long, and vLLM keeps it there."""
    (home := pods.folder / "home").mkdir(exist_ok=True)
    home.chmod(0o1777)
    return render({"config": text, "home": {"hostPath": {"path": str(home)}}})


async def _installed(pods: Cluster) -> None:
    pods.apply(_rendered(pods, YAML))
    await _settled(pods)
    (address,) = pods.endpoints("pdserve")
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=300) as client:
        assert (await client.get("/v1/models")).status_code == 401
        asked = {"model": "demo", "prompt": "one " * 200, "max_tokens": 4}
        answer = await client.post("/v1/completions", json=asked, headers=HEADERS)
    assert answer.headers["x-pdserve-prefill"] == "remote", answer.text


async def _upgraded(pods: Cluster) -> None:
    """Another YAML: each pod but those of the servers is another one afterwards."""
    before = {pod.name for pod in pods.pods if pod.owner["kind"] == "Deployment"}
    pods.apply(_rendered(pods, YAML + "# changed\n"))
    await _settled(pods)
    assert not before & {pod.name for pod in pods.pods}


async def _scaled(pods: Cluster) -> None:
    for replicas in (3, 1):
        pods.scale("pdserve-prefill", replicas)
        await _settled(pods)


async def _node_lost(pods: Cluster) -> None:
    pods.lose(pods.of("pdserve-decode")[0])
    await _settled(pods)


async def _probe_failed(pods: Cluster) -> None:
    """A pod that answers nothing is started again."""
    pod = pods.of("pdserve-prefill")[0]
    pod.host.link.cut()
    await _until(lambda: pod.restarts == 1, pods)
    pod.host.link.mend()
    await _settled(pods)


async def _settled(pods: Cluster) -> None:
    await _until(lambda: pods.settled, pods)


async def _until(condition: Callable[[], bool], pods: Cluster) -> None:
    async with asyncio.timeout(400):
        while not condition():
            for task in (pod.task for pod in pods.pods):
                assert task is None or not task.done() or not task.exception(), task
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _load(pods: Cluster) -> AsyncIterator[JudgedLoad]:
    """Clients that ask what is ready of the Service, with a connection for each request, as through kube-proxy."""
    cases = endless(PromptLengths((8, 48), (164, 1500)), seed=7)
    known = (replace(case, expected=computed(case, SimModel())) for case in cases)
    (first,) = pods.endpoints("pdserve")
    async with JudgedLoad(f"http://{first}", "demo", known, CLIENTS, timeout=60, headers=HEADERS) as load:
        follow = asyncio.create_task(_follow(pods, load))
        yield load
    follow.cancel()
    with suppress(asyncio.CancelledError):
        await follow


async def _follow(pods: Cluster, load: JudgedLoad) -> None:
    while True:
        load.urls = [f"http://{address}" for address in pods.endpoints("pdserve")] or load.urls
        await asyncio.sleep(0.05)
