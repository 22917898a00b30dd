"""Checks addresses of servers. Each check returns the normalized address, or raises ValueError with the end of a
sentence that begins with the key."""

from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from pydantic_core import PydanticCustomError

from pdserve.util.net import split_servers, strip_passwords


def nats_url(url: str) -> str:
    """Return the URL with a lower-case scheme."""
    parts = _split(url := _lower_scheme(url))
    if parts is None or parts.scheme not in ("nats", "tls") or not parts.hostname or parts.path.strip("/"):
        is_web = parts is not None and parts.scheme in ("ws", "wss")
        text = f"must be a NATS URL{' without WebSockets' * is_web}, as in nats://10.0.0.5:4222."
        raise ValueError(f"is {strip_passwords(url)!r}, but {text}")
    return url


def etcd_address(address: str) -> str:
    """Return host:port, or https://host:port as given. `http://` is removed, because the graph's credentials decide
    whether the connection is encrypted."""
    address = _lower_scheme(address)
    parts = _split(address if "://" in address else f"http://{address}")
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or parts.path.strip("/")
        or not (parts.hostname and parts.port)
    ):
        text = "must be etcd's client address, as in 10.0.0.5:2379."
        raise ValueError(f"is {strip_passwords(address)!r}, but {text}")
    return address.removeprefix("http://").rstrip("/")


def each_address(check: Callable[[str], str]) -> Callable[[object], str]:
    """Return a check of several addresses: a list, or a text with commas. The check returns a text with commas."""

    def check_each(value: object) -> str:
        texts = split_servers(value) if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
            raise PydanticCustomError("addresses", "not addresses")
        servers = [check(text.strip()) for text in texts]
        if twice := {server for server in servers if servers.count(server) > 1}:
            raise ValueError(f"names {strip_passwords(min(twice))!r} twice: name each server once.")
        return ",".join(servers)

    return check_each


def own_address(host: str) -> str:
    if not host.strip("0.:"):
        text = "must be the address at which other machines reach this one."
        raise ValueError(f"is {host!r}, but {text}")
    return host


def traces_url(url: str) -> str:
    """Return the URL to send spans to, from a collector's URL."""
    url = collector_url(url).rstrip("/")
    return url if urlsplit(url).path.endswith("/v1/traces") else f"{url}/v1/traces"


def collector_url(url: str) -> str:
    parts = _split(url := _lower_scheme(url))
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        text = "must be a collector's URL for OTLP over HTTP, as in http://127.0.0.1:4318."
        raise ValueError(f"is {strip_passwords(url)!r}, but {text}")
    return url


def _lower_scheme(url: str) -> str:
    scheme, colon, rest = url.strip().rpartition("://")
    return scheme.lower() + colon + rest


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a port
    except ValueError:
        return None
    return parts
