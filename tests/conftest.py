"""Fixtures shared by all tests: one real NATS and one real etcd for the session."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.servers import etcd_server, nats_server, running


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
