"""Ports for the KV side channel. vLLM does not say when its port is taken: its start then hangs for ever."""

import socket

from pdserve.errors import ConfigError


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError([f"the KV side channel cannot use {host}:{port}: {error.strerror}"]) from error
