from collections.abc import Iterator

import pytest

from tests.conformance.pair import Pair
from tests.conformance.parsers.thinking import Thinking, thinking_servers


@pytest.fixture(scope="package")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """For the tests of this folder, which come before those of the other engines."""
    with thinking_servers(tmp_path_factory.mktemp("thinking")) as servers:
        yield servers


@pytest.fixture(scope="package")
def pair(thinking: Thinking) -> Pair:
    return thinking.pair
