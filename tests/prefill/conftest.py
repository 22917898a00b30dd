"""Fixtures of the tests of prefill workers."""

from tests.decode.conftest import impatient

__all__ = ["impatient"]
