"""The registry seam (see `base`). `connect` gives the implementation that the address asks for."""

from collections.abc import Callable
from importlib import import_module

from pdserve.credentials import Credentials
from pdserve.registry.base import Registry

_IMPLEMENTATIONS = {"etcd": "pdserve.registry.etcd", "memory": "pdserve.registry.memory"}


def connect(
    etcd: str, namespace: str, credentials: Credentials | None = None, *, patient: bool = False
) -> Registry:
    """A registry to enter; `patient` as in the contract. `etcd` is `host:port`, several of them separated by commas,
    or `memory://<name>` for one that lives in this process. With credentials, all is TLS and nothing else."""
    module = import_module(_IMPLEMENTATIONS["memory" if etcd.startswith("memory://") else "etcd"])
    implementation: Callable[[str, str, Credentials | None, bool], Registry] = module.connect
    return implementation(etcd, namespace, credentials, patient)
