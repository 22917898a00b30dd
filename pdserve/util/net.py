"""Addresses and TCP ports of this machine."""

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
"""range of `free_port`, below the ports that Linux gives to outgoing connections (32768 and up): such a port may be
taken while its server is down, even by a client that tries to reach that server and connects to itself"""
_TRIES = 1000
_KEPT = 256
"""claims of this process that are held, the newest"""
_claims: deque[int] = deque()
"""their file descriptors"""


def is_loopback(host: str) -> bool:
    """Whether the address is a loopback address. False for every name but localhost: it may resolve to anything."""
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def resolve_host(host: str) -> list[str]:
    """The IP addresses that a host's name stands for, or the address itself; none where the name cannot be resolved."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_local_host_header(authority: str) -> bool:
    """Whether the `Host` header of a request is localhost or an IP address, and not a name that a web page could have
    made to resolve to this machine (DNS rebinding)."""
    try:
        name = urlsplit(f"//{authority}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False


def url_host(host: str, everywhere: str) -> str:
    """Return `host` as it is written in a URL; `everywhere` in its place where it listens on all addresses."""
    host = everywhere if host in ("0.0.0.0", "::", "") else host
    return f"[{host}]" if ":" in host else host


def split_servers(text: str | None) -> list[str]:
    """The addresses of a server or, separated by commas, of all servers of a cluster; none for an empty text."""
    return [server.strip() for server in text.split(",")] if text else []


def strip_passwords(addresses: str) -> str:
    """The addresses of servers without the user names and passwords before an `@`: for logs, errors and pages."""
    parts = (server.rpartition("://") for server in split_servers(addresses))
    return ",".join(f"{scheme}{colon}{rest.rpartition('@')[2]}" for scheme, colon, rest in parts)


def free_port(host: str, count: int = 1) -> int:
    """Return the first of `count` free ports in a row. None of them was given to any process lately, since a server may
    take seconds until it listens on its port. Raises OSError where there are none."""
    for _ in range(_TRIES):
        first = random.randint(_FIRST, _LAST)
        ports = range(first, first + count)
        if all(_is_free(host, port) for port in ports) and _claim(ports):
            return first
    raise OSError(errno.EADDRINUSE, f"no {count} free ports on {host}")


def _claim(ports: Iterable[int]) -> bool:
    """Claim the ports among all processes of this machine that call `free_port`, by an abstract Unix socket named after
    each; false where one is claimed. A claim ends with the process, or after `_KEPT` further claims."""
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
    while len(_claims) > _KEPT:
        os.close(_claims.popleft())
    return True


def find_port_holder(host: str, port: int, ours: Collection[int] = ()) -> str | None:
    """Return the name and pid of the process that listens on this port, as far as this user may know; None where it is
    free, or held by one of `ours` (pids). Raises ConfigError where this user cannot listen at all: the address is not
    this machine's, or the port is reserved for root."""
    try:
        if _is_free(host, port, again=True):
            return None
    except OSError as error:
        raise ConfigError([f"{host}:{port} cannot be listened on: {error.strerror or error}."]) from error
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            if connection.pid in ours:
                return None
            with suppress(psutil.Error):  # it has just ended
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"


def _is_free(host: str, port: int, again: bool = False) -> bool:
    """With `again`, connections that a stopped server left behind do not count."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
