"""What tests of prefill workers share."""

from tests.decode.conftest import impatient

__all__ = ["impatient"]
