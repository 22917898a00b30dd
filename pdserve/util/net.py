"""Addresses, URLs and TCP ports."""

import errno
import os
import random
import socket
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

import psutil

from pdserve.util.errors import ConfigError

_FIRST, _LAST = 15000, 30000
"""Range of `free_port`. Linux's ephemeral ports begin at 32768: an outgoing connection may take one of them while the
server is down."""
_TRIES = 1000
_MAX_CLAIMS = 256
"""Maximum of port claims of this process; a further claim ends the oldest."""
_claims: deque[int] = deque()
"""File descriptors of the claims."""


def is_loopback(host: str) -> bool:
    """Whether the address is a loopback address. False for every name but localhost: a name may resolve to anything."""
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def resolve_host(host: str) -> list[str]:
    """Return the IP addresses of a host name or address; none if it cannot be resolved."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_local_host_header(authority: str) -> bool:
    """Whether a request's `Host` header is localhost or an IP address. Any other name may be DNS rebinding."""
    try:
        name = urlsplit(f"//{authority}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False


def url_host(host: str, everywhere: str) -> str:
    """Return `host` as it is written in a URL; `everywhere` replaces the wildcard address."""
    host = everywhere if host in ("0.0.0.0", "::", "") else host
    return f"[{host}]" if ":" in host else host


def split_servers(text: str | None) -> list[str]:
    """Split comma-separated server addresses."""
    return [server.strip() for server in text.split(",")] if text else []


def strip_passwords(addresses: str) -> str:
    """Remove user names and passwords from comma-separated server addresses, for logs, errors and pages."""
    parts = (server.rpartition("://") for server in split_servers(addresses))
    return ",".join(f"{scheme}{colon}{rest.rpartition('@')[2]}" for scheme, colon, rest in parts)


def free_port(host: str, count: int = 1) -> int:
    """Return the first of `count` consecutive free ports, and claim them, because a server may take seconds until it
    listens on its port. Raises OSError if there are none."""
    for _ in range(_TRIES):
        first = random.randint(_FIRST, _LAST)
        ports = range(first, first + count)
        if all(_is_free(host, port) for port in ports) and _claim(ports):
            return first
    raise OSError(errno.EADDRINUSE, f"no {count} free ports on {host}")


def _claim(ports: Iterable[int]) -> bool:
    """Claim the ports against other calls of `free_port` on this machine, by an abstract Unix socket for each port.
    Return false if one is claimed already. A claim ends with the process, or after `_MAX_CLAIMS` further claims."""
    claims: list[int] = []
    for port in ports:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(f"\0pdserve-port-{port}")
            except OSError:
                for held in claims:
                    os.close(held)
                return False
            claims.append(claim.detach())
    _claims.extend(claims)
    while len(_claims) > _MAX_CLAIMS:
        os.close(_claims.popleft())
    return True


def find_port_holder(host: str, port: int, ours: Collection[int] = ()) -> str | None:
    """Return the name and pid of the process that listens on this port, or `another process` if this user may not know.
    None: the port is free, or one of the pids `ours` has it. Raises ConfigError if this user cannot listen there: the
    address is not this machine's, or the port is reserved for root."""
    try:
        if _is_free(host, port, reuse=True):
            return None
    except OSError as error:
        other = error.errno == errno.EADDRNOTAVAIL
        why = (
            "no address of this machine: correct PDSERVE_HOST, Graph.host or Frontend.host"
            if other
            else error.strerror or error
        )
        raise ConfigError([f"cannot listen on {host}:{port}: {why}."]) from error
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            if connection.pid in ours:
                return None
            with suppress(psutil.Error):  # the process has just ended
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"


def _is_free(host: str, port: int, reuse: bool = False) -> bool:
    """Whether the port can be bound. `reuse` ignores the TIME_WAIT connections of a stopped server."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
