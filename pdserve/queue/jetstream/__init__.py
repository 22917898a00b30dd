"""The prefill queue, the blob store and the stored responses on NATS: the only place that imports nats."""

from pdserve.credentials import Credentials
from pdserve.queue.jetstream.blobs import NatsBlobs as connect_blobs
from pdserve.queue.jetstream.blobs import clock_skew
from pdserve.queue.jetstream.broadcast import NatsBroadcast as connect_broadcast
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.responses import JetStreamResponses as connect_responses


def connect(nats: str, namespace: str, model: str, credentials: Credentials | None) -> JetStreamQueue:
    return JetStreamQueue(nats, namespace, model, credentials=credentials)


__all__ = ["clock_skew", "connect", "connect_blobs", "connect_broadcast", "connect_responses"]
