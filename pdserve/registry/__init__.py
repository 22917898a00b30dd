"""The registry seam (see `base`). It is on etcd; tests have one in memory."""

from pdserve.registry.base import Registry
from pdserve.security.credentials import Credentials


def connect(
    etcd: str, namespace: str, credentials: Credentials | None = None, *, patient: bool = False
) -> Registry:
    """Return a registry to enter; `patient` as in the contract. `etcd` is `host:port`, several of them separated by
    commas. With credentials all connections use TLS."""
    from pdserve.registry.etcd import EtcdRegistry

    return EtcdRegistry(etcd, namespace, patient=patient, credentials=credentials)
