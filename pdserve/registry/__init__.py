"""The registry seam (see `base`). The address chooses the implementation."""

from pdserve.credentials import Credentials
from pdserve.registry.base import Registry


def connect(
    etcd: str, namespace: str, credentials: Credentials | None = None, *, patient: bool = False
) -> Registry:
    """Return a registry to enter; `patient` as in the contract. `etcd` is `host:port`, several of them separated by
    commas, or `memory://<name>` for a server in this process. With credentials all connections use TLS."""
    if etcd.startswith("memory://"):
        from pdserve.registry.memory import MemoryRegistry, server_at

        return MemoryRegistry(server_at(etcd), namespace)
    from pdserve.registry.etcd import EtcdRegistry

    return EtcdRegistry(etcd, namespace, patient=patient, credentials=credentials)
