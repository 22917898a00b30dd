"""What tests of prefill workers share."""

from tests.decode.conftest import impatient
from tests.queue.conftest import nats_outage

__all__ = ["impatient", "nats_outage"]
