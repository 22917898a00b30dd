"""TCP ports of this machine."""

import socket

import psutil


def free_port(host: str) -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_holder(host: str, port: int) -> str | None:
    """Who listens on this port, as far as this user may know; None when it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            pass
        else:
            return None
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"
