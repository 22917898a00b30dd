from collections.abc import Iterator

import pytest

from tests.conformance.pair import Pair
from tests.e2e.graph import RealGraph
from tests.real import Reference


@pytest.fixture(scope="module")
def begun(request: pytest.FixtureRequest, pair: Pair) -> None:
    """Send all `REQUESTS` of the file in advance, several at a time, so that engines batch them."""
    pair.begin(request.module.REQUESTS)


@pytest.fixture(scope="session")
def pair(graph: RealGraph, vllm_server: Reference) -> Iterator[Pair]:
    with Pair(graph.url, vllm_server.url) as pair:
        yield pair
