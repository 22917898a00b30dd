"""Fixtures shared by all tests: a real NATS and a real etcd for the session. And which tests may run side by side."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.servers import etcd_server, nats_server, running

SERIAL = ("engines", "chaos")
"""markers, in the order in which their tests run: each of these tests alone can take all of a small machine, so they
follow one another in one process, chaos last, when the other processes have ended"""


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` (`make test`) the tests of a file stay together, for they share its fixtures, and so
    do those that are `SERIAL`, which take longest and therefore begin first."""

    def turn(item: pytest.Item) -> int:
        marked = (number for number, marker in enumerate(SERIAL) if item.get_closest_marker(marker))
        return next(marked, len(SERIAL))

    items.sort(key=turn)
    for item in items:
        group = "serial" if turn(item) < len(SERIAL) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


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


@pytest.fixture
def namespace() -> str:
    """Of this test alone."""
    return f"test-{uuid4().hex[:12]}"
