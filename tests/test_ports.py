import socket

import pytest

from pdserve.errors import ConfigError
from pdserve.ports import free_port, port_holder

LOOPBACKS = pytest.mark.parametrize("host", ["127.0.0.1", "::1"])


@LOOPBACKS
def test_free_ports_are_below_those_of_connections(host: str) -> None:
    """Otherwise an outgoing connection may hold a port before its server has started, or while it is down."""
    assert all(15000 <= free_port(host, 32) <= 30000 for _ in range(20))


@LOOPBACKS
def test_the_holder_of_a_port(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        assert "pid" in (port_holder(host, port) or "")
    assert port_holder(host, port) is None


def test_the_ipv6_wildcard_address() -> None:
    assert port_holder("::", free_port("::")) is None


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^192\.0\.2\.1:8000 cannot be listened on: Cannot assign requested"
    ):
        port_holder("192.0.2.1", 8000)
