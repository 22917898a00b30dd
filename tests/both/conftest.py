"""Fixtures that tests of workers share."""

from tests.decode.conftest import frontend, graph

__all__ = ["frontend", "graph"]
