"""`helm upgrade` to another version and `helm rollback`, under load, in the benchmarks' small kubelet."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pdserve_bench.chaos import questions
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.endpoint import key_headers
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.graphs.watch import GraphWatch
from pdserve_bench.hosts.pods import CHART, PROGRAMS, Object, rendered
from pdserve_bench.hosts.release import Release
from pdserve_bench.soak.usage import nats_keeps

from pdserve.config.load import load as load_config
from pdserve.registry import keys
from pdserve.security.credentials import Credentials
from pdserve.supervisor.state import GraphRecord
from tests.conditions import until
from tests.deploy.helm import SECRETS
from tests.network import hosts

KEY = "sk-of-the-tests-of-upgrades"
OLD, NEW = "0.8.0", "0.9.0"
SPEED = {"step-seconds": 0.02, "prefill-rate": 5000, "lease": 12}
CLIENTS = 6
PATIENCE = 120.0
"""Maximum seconds of a request, and maximum seconds until a replaced graph prefills remotely."""
SETTLE = 40.0
"""Seconds until all KV must be free: longer than a KV lease."""
SERVERS: Object = {"nats": {"image": "nats:2.13"}, "etcd": {"image": "etcd:3.7"}}


def _config(prefill_workers: int, **common: object) -> Object:
    sections = simulated(SPEED, common=common, graph={"drain-timeout": 20})
    sections["VllmWorker"]["ServiceArgs"] = {"workers": 2}
    sections["PrefillWorker"]["ServiceArgs"] = {"workers": prefill_workers}
    return sections | {"Security": {"allow": ["plain-http"]}}


def _make_version(version: str, folder: Path) -> None:
    """Copy the package and the chart as this version."""
    shutil.copytree(CHART.resolve().parents[2] / "pdserve", folder / version / "pdserve")
    shutil.copytree(CHART, folder / version / "chart")
    for file, field in (
        ("pdserve/__init__.py", "__version__ = "),
        ("chart/Chart.yaml", "(?:appV|v)ersion: "),
    ):
        path = folder / version / file
        path.write_text(re.sub(f'({field})"?[0-9.]+"?', rf'\1"{version}"', path.read_text()))


UPGRADE = """
import sys
from pathlib import Path
from pdserve.security.credentials import Credentials
from tests.deploy.test_chart_upgrade import upgrade_and_roll_back

upgrade_and_roll_back(Path(sys.argv[1]), Credentials(Path(sys.argv[2])))
"""


@pytest.mark.timeout(900)
def test_no_request_fails_during_an_upgrade_and_a_rollback(tmp_path: Path, credentials: Credentials) -> None:
    """The upgrade has its own process, because gRPC's threads stay in the network namespace in which they started."""
    with hosts(tmp_path / "try"):
        pass  # skips the test where hosts are not permitted
    words = [sys.executable, "-c", UPGRADE, str(tmp_path), str(credentials.folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]


def upgrade_and_roll_back(folder: Path, credentials: Credentials) -> None:
    """First, all of pdserve is upgraded, with another number of prefill workers and other KV blocks, and then NATS and
    etcd. Finally, everything is rolled back at once."""
    folder.chmod(0o755)  # pods read the builds there
    (cache := folder / "cache").mkdir()
    cache.chmod(0o777)  # vLLM's cache: without it, each pod would inspect the model again
    common = SECRETS | {"env": [{"name": "VLLM_CACHE_ROOT", "value": str(cache)}]}
    for version in (OLD, NEW):
        _make_version(version, folder)
    before, after = _config(1), _config(2, **{"block-size": 16})
    upgrade = rendered(common | {"config": after}, folder / NEW / "chart")
    with_servers = rendered(common | {"config": after} | SERVERS, folder / NEW / "chart")
    rollback = rendered(common | {"config": before}, folder / OLD / "chart")
    secrets = {
        "graph-certificates": {path.name: path.read_text() for path in credentials.folder.iterdir()},
        "keys": {"api-keys": KEY},
    }
    builds = {version: folder / version for version in (OLD, NEW)}

    async def story() -> None:
        async with Release(net, folder, secrets, builds) as release:
            await release.upgrade(rollback)
            await until(lambda: _lists_the_model(release.urls[0]), PATIENCE)
            load = JudgedLoad("", "demo", _cases(before, folder), CLIENTS, PATIENCE, key_headers(KEY))
            load.urls = release.urls
            async with load:
                began = time.monotonic()
                await _prefilled_remotely(load)
                servers = _servers(release)
                await release.upgrade(upgrade)
                assert _servers(release) == servers, "an upgrade of pdserve restarted NATS or etcd"
                for version, revision in ((NEW, with_servers), (OLD, rollback)):
                    await release.upgrade(revision)
                    await _prefilled_remotely(load)
                    await _assert_registered(version, release, credentials)
                    assert not servers & _servers(release)
                    servers = _servers(release)
            traces = [seen.trace for seen in load.seen("upgrade", began) if seen.trace]
            assert traces == [], "\n".join(map(str, traces))
            assert len(load.done) > 20
            await _assert_nothing_is_left(release, credentials)
            await release.uninstall()

    with hosts(folder) as net:
        asyncio.run(story())


def _cases(config: Object, folder: Path) -> Iterator[questions.Case]:
    loaded = load_config(write(config, folder / "graph.yaml"), {})
    model = questions.simulated(loaded)
    assert model
    for case in questions.endless(questions.prompt_lengths(loaded, 4096), 1):
        yield replace(case, expected=questions.computed(case, model))


async def _lists_the_model(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False, verify=False, headers=key_headers(KEY)) as client:
        return bool((await client.get(f"{url}/v1/models", timeout=30)).json()["data"])


async def _prefilled_remotely(load: JudgedLoad) -> None:
    since = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        await load.until(lambda answer: answer.prefill == "remote" and answer.started > since)


def _servers(release: Release) -> set[str]:
    """The addresses of NATS and etcd."""
    return {each.pod.host.address for each in release.running if not each.pod.is_role}


def _record(release: Release, credentials: Credentials) -> GraphRecord:
    at = {each.name: each.pod.host.address for each in release.running}
    etcd, nats = f"{at['pdserve-etcd-0']}:2379", f"nats://{at['pdserve-nats-0']}:4222"
    return GraphRecord(os.getpid(), "", "demo", "pdserve", etcd, nats, credentials=str(credentials.folder))


async def _assert_registered(version: str, release: Release, credentials: Credentials) -> None:
    """Assert that etcd has the instances and cards of the running pods, and nothing else."""
    async with GraphWatch() as watch:
        await watch.move(_record(release, credentials))
        instances = await watch.instances()
        assert {each.version for each in instances} == {version}
        roles = sorted(each.pod.host.address for each in release.running if each.pod.is_role)
        assert sorted(each.host for each in instances) == roles
        stored = set(await watch.registry.read(""))
        cards = {keys.card(each.model, each.id) for each in instances}
        assert stored - cards == {keys.instance(each) for each in instances}


async def _assert_nothing_is_left(release: Release, credentials: Credentials) -> None:
    """Assert that NATS has at most one consumer per fingerprint, etcd one lease per role's pod, and workers no KV."""
    record = _record(release, credentials)
    async with GraphWatch() as watch:
        await watch.move(record)
        await watch.learn()
        left = await watch.leftovers(SETTLE)
        assert (left.blocks, left.queued, left.amiss) == ({}, 0, ())
    assert await nats_keeps(record) <= 2
    (etcd,) = (each.pod for each in release.running if each.name == "pdserve-etcd-0")
    etcdctl, *options = etcd.spec["readinessProbe"]["exec"]["command"][:-2]
    log = etcd.host.folder / "leases"
    await etcd.host.start([*PROGRAMS[etcdctl], *options, "lease", "list"], log).ended(30)
    (count,) = re.findall(r"found (\d+) leases", log.read_text())
    assert int(count) == sum(each.pod.is_role for each in release.running)
