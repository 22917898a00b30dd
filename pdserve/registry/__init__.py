"""The registry (contract in `base.py`), implemented on etcd. Tests have one in memory."""

from pdserve.registry.base import Registry
from pdserve.security.credentials import Credentials


def connect(
    etcd: str, namespace: str, credentials: Credentials | None = None, *, patient: bool = False
) -> Registry:
    """Return a registry, to be entered. `etcd` is `host:port`, or a cluster's addresses separated by commas. With
    credentials all connections use TLS. `patient` is explained in `base.Registry`."""
    from pdserve.registry.etcd import EtcdRegistry

    return EtcdRegistry(etcd, namespace, patient=patient, credentials=credentials)
