"""The prefill queue and the blob store on NATS: the only place that imports nats."""

from pdserve.queue.jetstream.blobs import NatsBlobs as connect_blobs
from pdserve.queue.jetstream.blobs import clock_skew
from pdserve.queue.jetstream.queue import JetStreamQueue as connect

__all__ = ["clock_skew", "connect", "connect_blobs"]
