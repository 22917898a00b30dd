"""Addresses, folders and names that a configuration may hold: what is wrong with one, as the end of a
sentence that begins with its key, and what it stands for."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pdserve.config.findings import Findings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def wrong_nats(url: str) -> str | None:
    parts = _split(url)
    if parts is not None and parts.scheme in ("tls", "ws", "wss"):
        return f"is {url!r}, but NATS is reached without TLS and WebSockets only, as in nats://10.0.0.5:4222."
    if parts is None or parts.scheme != "nats" or not parts.hostname or parts.path.strip("/"):
        return f"is {url!r}, but must be a NATS URL, as in nats://10.0.0.5:4222."
    return None


def wrong_etcd(address: str) -> str | None:
    parts = _split(address if "://" in address else f"http://{address}")
    if (
        parts is None
        or parts.scheme != "http"
        or not parts.hostname
        or not parts.port
        or parts.path.strip("/")
    ):
        return f"is {address!r}, but must be etcd's client address without TLS, as in 10.0.0.5:2379."
    return None


def plain_etcd(address: str) -> str:
    """host:port of an address that is not wrong."""
    return address.removeprefix("http://").rstrip("/")


def wrong_host(host: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", host) is None:
        return f"is {host!r}, but must be a host name or IP address without scheme or port, as in 10.0.0.5."
    return None


def wrong_namespace(name: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
        return f"is {name!r}, but may have letters, digits, - and _ only: it becomes part of NATS subjects."
    return None


def wrong_model(model: str, beside: Path) -> str | None:
    if _is_path(model) or (beside / model).is_dir() or _HUB_ID.fullmatch(model):
        return None
    return f"is {model!r}, but must be demo, a model folder or a hub id, as in Qwen/Qwen3-0.6B."


def resolve_model(model: str, beside: Path) -> str:
    """An absolute folder or a hub id. A relative path counts from the YAML file's folder."""
    if model == "demo":
        from pdserve.demo import MODEL_DIR

        return str(MODEL_DIR)
    path = beside / Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() or _is_path(model) else model


def folder(path: str, beside: Path) -> Path:
    return (beside / Path(path).expanduser()).resolve()


def from_env(
    name: str, env: Mapping[str, str], wrong: Callable[[str], str | None], findings: Findings
) -> str | None:
    """The variable's value; empty counts as not set."""
    value = env.get(name) or None
    if value is not None and (problem := wrong(value)):
        findings.outside(f"Environment variable {name}", problem)
    return value


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no port
    except ValueError:
        return None
    return parts
