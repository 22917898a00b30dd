"""Fixtures of all tests, and the order in which processes run the files."""

import gc
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings

from pdserve.security.credentials import Credentials, create
from tests.e2e.graph import RealGraph
from tests.engine.sims import FAST
from tests.real import Reference, one_graph, one_vllm
from tests.servers import etcd_server, nats_server, running

settings.register_profile("same each time", derandomize=True)
settings.register_profile("searching")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same each time"))
"""Each run has the same examples, so that a failure is due to the commit. HYPOTHESIS_PROFILE=searching tries others."""

ENGINES = (
    "tests/chaos/test_real_engines.py",
    "tests/conformance/",
    "tests/e2e/",
    "tests/engine/test_speculation.py",
    "tests/engine/test_vllm_engine.py",
    "tests/install/test_wheel.py",
)
"""One process runs these in turn, because all real engines at once would take more than 24 GB. They take longest and
begin first."""
CHAOS = ("tests/chaos/test_chaos.py", "tests/test_house.py")
"""One process runs these in turn. xdist assigns each process its next file in advance. After the long chaos tests, that
is a short file, so that no other long file waits."""
ORDER = (
    *ENGINES,
    "tests/bench/compare/test_command.py",
    "tests/test_serve_sim.py",
    "tests/cli/test_cli.py",
    "tests/process/test_standalone.py",
    "tests/registry/test_outage.py",
    *CHAOS,
)
"""The longest files begin first, so that all processes end together. Chaos waits until most tests of real engines are
over. Other files run last, by name."""
NICE = 5
EXIT_AFTER = 60
"""Seconds from a test's timeout until its process exits, which ends the whole run."""

gc.disable()  # collecting tests imports vLLM, and a third of the time would go into searching its objects


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _turn(item: pytest.Item) -> int:
    found = (number for number, file in enumerate(ORDER) if item.nodeid.startswith(file))
    return next(found, len(ORDER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` (`make test`), one process runs all tests of a file, because they share fixtures. The
    files of `ENGINES` count as one file here, and so do those of `CHAOS`. (xdist's own `loadgroup` does not work
    under pytest 9.)"""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            for name, files in (("engines", ENGINES), ("chaos", CHAOS)):
                if nodeid.startswith(files):
                    return name
            return str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test that swallows its timeout's exception, because CI would wait for the test."""
    marker = item.get_closest_marker("timeout")
    timeout = float(marker.args[0] if marker else item.config.getini("timeout"))
    timer = threading.Timer(timeout + EXIT_AFTER, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give tests of real engines a lower priority: a dozen processes import vLLM at the same time."""
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    if beside_others and item.nodeid.startswith(ENGINES) and not os.getpriority(os.PRIO_PROCESS, 0):
        os.nice(NICE)


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nats-server with JetStream that must not be harmed; tests of outages start their own."""
    with running(nats_server(tmp_path_factory.mktemp("nats"))) as server:
        yield server.url


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd that must not be harmed; tests of outages start their own."""
    with running(etcd_server(tmp_path_factory.mktemp("etcd"))) as server:
        yield server.url


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """vLLM's own server with the arguments of `graph`, to compare with."""
    with one_vllm(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory, vllm_server: Reference) -> Iterator[RealGraph]:
    """A real graph that must not be harmed: one decode and one prefill worker. Starts after `vllm_server`, so that
    three engines never load at once on a small machine."""
    del vllm_server
    with one_graph(tmp_path_factory.mktemp("graph")) as graph:
        yield graph


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return create(tmp_path_factory.mktemp("graph-of") / "credentials")


@pytest.fixture
def namespace() -> str:
    """A namespace for this test alone."""
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
def brief_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short transfer timeouts, for tests whose simulated engines cannot read KV."""
    monkeypatch.setitem(FAST, "transfer-timeout", 0.3)
