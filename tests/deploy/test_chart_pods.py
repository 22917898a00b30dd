"""The rendered pods run with simulated engines in the benchmarks' small kubelet (`hosts/pods.py`)."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from pdserve_bench.hosts.pods import Object, Pod, pods_of, write_names

from pdserve.security.credentials import Credentials
from tests.conditions import until
from tests.deploy.helm import Rendering, render
from tests.deploy.prometheus import scraping
from tests.deploy.test_outages import DECODE, ETCD, NATS, PREFILL, Watched
from tests.network import hosts

KEY = "sk-of-the-tests-of-the-chart"
YAML = """
Common: {model: demo, block-size: 32, max-model-len: 4096}
Frontend: {served_model_name: demo, port: 8000}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 100
  common-configs: [model, block-size, max-model-len]
PrefillWorker: {engine: sim, common-configs: [model, block-size, max-model-len]}
Security: {allow: [plain-http]}
Graph: {drain-timeout: 20}
"""
CLUSTER: Object = {
    "config": YAML.replace("model: demo,", "model: /models/model,"),
    "fullnameOverride": "pdserve",
    "commonLabels": {"example.org/cost": "serving"},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "kvOffloadFolder": {"emptyDir": {}},
    "pod": {
        "metadata": {"annotations": {"example.org/team": "llm"}},
        "spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    },
    "frontend": {
        "pod": {"spec": {"containers": [{"name": "frontend", "env": [{"name": "TZ", "value": "UTC"}]}]}}
    },
}
"""Values that users set for their own cluster."""
ROLES = ("frontend", "decode", "prefill")
OUTAGES = (
    ("nats", "NATS does not answer", (NATS,)),
    ("etcd", "etcd does not answer", (ETCD,)),
    ("prefill", "no prefill worker is available", (PREFILL, "PdserveWorkerDown: prefill-0 on")),
    (
        "decode",
        "no decode worker is available: prefill-0 stands in",
        (DECODE, "PdserveWorkerDown: decode-0 on"),
    ),
)
"""pod that is cut off, problem in `/health`, alerts"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("values", [{"config": YAML}, CLUSTER], ids=["defaults", "cluster"])
def test_pods_get_ready_serve_requests_and_end(
    tmp_path: Path, credentials: Credentials, values: Object
) -> None:
    with hosts(tmp_path) as net:
        pods = pods_of(render(values), net, _secrets(credentials))
        names = write_names(tmp_path, pods)

        async def ready(kind: str) -> bool:
            return all(await asyncio.gather(*(pod.well(kind) for pod in pods)))

        async def story() -> None:
            await asyncio.gather(*(pod.start(names) for pod in pods))
            await until(lambda: ready("startupProbe"), 300)
            await until(lambda: ready("readinessProbe"), 60)
            assert await ready("livenessProbe")
            (frontend,) = (pod for pod in pods if pod.host.name == "pdserve-frontend-0")
            await check_answers(f"http://{frontend.host.address}:{frontend.port('http')}")
            roles = [pod for pod in pods if pod.owner["kind"] == "Deployment"]
            ended = {pod.host.name: await pod.end() for pod in (frontend, *(set(roles) - {frontend}))}
            assert set(ended.values()) == {0}, ended

        asyncio.run(story())


@pytest.mark.timeout(600)
def test_outages_have_their_alerts(tmp_path: Path, credentials: Credentials) -> None:
    """Prometheus scrapes each pod as the PodMonitor says. Like `test_outages.py`, but with cut links."""
    monitored = {"config": YAML, "monitoring": {"podMonitor": {"enabled": True}}}
    rendering = render(monitored)
    with hosts(tmp_path) as net:
        pods = pods_of(rendering, net, _secrets(credentials))
        names = write_names(tmp_path, pods)
        by_role = {pod.host.name.split("-")[1]: pod for pod in pods}

        async def story(graph: Watched) -> None:
            await asyncio.gather(*(pod.start(names) for pod in pods))
            await until(graph.well, 300)
            await graph.fires()
            for role, problem, alerts in OUTAGES:
                link = by_role[role].host.link
                await net.aside(link.cut)
                await graph.is_degraded(problem)
                await graph.fires(*alerts)
                await net.aside(link.mend)
                await until(graph.well, 60)
                await graph.fires()
            found = graph.prometheus.series("pdserve_requests_in_flight")
            sources = {labels["source"].split(":")[0] for labels, _ in found}
            assert sources == {by_role["frontend"].host.address}
            assert "decode" in {labels["instance"].split("-")[0] for labels, _ in found}
            route = ["blackhole", by_role["decode"].host.address]
            for act, alert in (("add", ["PdserveLinkDown: "]), ("del", [])):
                process = by_role["frontend"].host.start(["ip", "route", act, *route], tmp_path / "route.log")
                assert await process.ended(30) == 0
                await graph.fires_among(*alert)
            await until(graph.well, 60)
            await net.aside(by_role["frontend"].host.link.cut)
            await graph.fires("PdserveNotScraped: ")
            await net.aside(by_role["frontend"].host.link.mend)
            await until(graph.well, 60)

        pages = [f"{by_role[role].host.address}:{_page_port(by_role[role])}" for role in ROLES]
        url = f"http://{by_role['frontend'].host.address}:{by_role['frontend'].port('http')}"
        with scraping(tmp_path, *pages, **_scrape_options(rendering)) as prometheus:
            asyncio.run(story(Watched(url, prometheus, KEY)))


def _scrape_options(rendering: Rendering) -> Object:
    """The PodMonitor's endpoint as options of a scrape job, without its `relabelings`."""
    (monitor,) = rendering.of("PodMonitor").values()
    (end,) = monitor["spec"]["podMetricsEndpoints"]
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    relabel = [
        {snake.get(key, key): value for key, value in each.items()} for each in end["metricRelabelings"]
    ]
    return {"honor_labels": end.get("honorLabels", False), "metric_relabel_configs": relabel}


def _page_port(pod: Pod) -> str:
    return str(pod.template["metadata"]["annotations"]["prometheus.io/port"])


def _secrets(credentials: Credentials) -> dict[str, dict[str, str]]:
    files = {path.name: path.read_text() for path in credentials.folder.iterdir()}
    return {"graph-certificates": files, "keys": {"api-keys": KEY}}


async def check_answers(url: str) -> None:
    asked = {"model": "demo", "prompt": "one " * 200, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
        assert (await client.get("/v1/models")).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"

        async def remote() -> bool:
            """Whether an uncached prompt is prefilled remotely. (The prefill worker may be ready later.)"""
            answer = await client.post("/v1/completions", json=asked | {"cache_salt": os.urandom(8).hex()})
            return answer.raise_for_status().headers["x-pdserve-prefill"] == "remote"

        await until(remote, 60)
