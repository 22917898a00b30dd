"""Unprotected addresses that other machines reach are refused, with the line and advice."""

from pathlib import Path

import pytest

from pdserve.util.net import is_loopback
from pdserve.util.program import pdserve_command
from tests.config.test_load import GOOD, problems, read

MAKE = f"make credentials (`{pdserve_command('credentials FOLDER')}`) and set Security.credentials"
ALLOW = "or accept it with Security.allow"
ALLOW_BOTH = "(PDSERVE_ALLOW=no-keys,plain-http)"
GRAPH_ADVICE = f"{MAKE}, {ALLOW}: [plain-graph] (PDSERVE_ALLOW=plain-graph)."
STREAMS = "other machines reach the workers' streams"
NO_TLS = "on another machine, but the connection would not be encrypted"
KEYS = "set Security.api-keys (or PDSERVE_API_KEYS)"
TLS = "Security.tls-certificate and tls-key"
NATS, ETCD = "nats: 'nats://127.0.0.1:4222'", "etcd: 'localhost:2379'"


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "::ffff:10.0.0.5", "localhost.example.com")))


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("", []),
        ("host: 10.0.0.7", []),  # serve makes credentials for the servers that it starts
        (f"{NATS}, {ETCD}", []),
        (f"{NATS}, host: 127.0.0.2", []),
        (f"{NATS}, host: 10.0.0.7", [f"host is 10.0.0.7, where {STREAMS}, but the graph has no "]),
        ("nats: 'nats://127.0.0.1:1,nats://n:4222'", [f"nats is n, {NO_TLS}: "]),
        ("nats: 'nats://n:4222', etcd: '[::2]:2379'", [f"nats is n, {NO_TLS}: ", f"etcd is ::2, {NO_TLS}: "]),
    ],
)
@pytest.mark.parametrize("security", ["", "allow: [plain-graph]", "credentials: folder"])
def test_an_unprotected_graph_is_refused(
    tmp_path: Path, graph: str, expected: list[str], security: str
) -> None:
    text = f"{GOOD}Graph: {{{graph}}}\nSecurity: {{{security}}}\n"
    if security or not expected:
        read(tmp_path, text)
        return
    found = problems(tmp_path, text)
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(f"FILE:11: Graph.{start}")
        assert problem.endswith(GRAPH_ADVICE)


@pytest.mark.parametrize("address", ["nats: 'TLS://127.0.0.1:4222'", "etcd: 'HTTPS://127.0.0.1:2379'"])
@pytest.mark.parametrize("allow", ["[]", "[plain-graph]"])
def test_a_server_with_tls_needs_credentials(tmp_path: Path, address: str, allow: str) -> None:
    text = f"{GOOD}Graph: {{{address}}}\nSecurity: {{allow: {allow}}}\n"
    (found,) = problems(tmp_path, text)
    assert found.startswith("FILE:11: Graph.")
    assert found.endswith(f", which asks for TLS, but the graph has no credentials: {MAKE}.")
    assert read(tmp_path, text.replace("allow", "credentials: c, allow")).security.credentials


@pytest.mark.parametrize(
    ("security", "keys", "expected"),
    [
        (
            "",
            "",
            f"no keys and no TLS: {KEYS} and {TLS}, {ALLOW}: [no-keys, plain-http] {ALLOW_BOTH}.",
        ),
        ("", "key", f"no TLS: set {TLS}, {ALLOW}: [plain-http] (PDSERVE_ALLOW=plain-http)."),
        (
            "tls-certificate: a, tls-key: b",
            "",
            f"no keys: {KEYS}, {ALLOW}: [no-keys] (PDSERVE_ALLOW=no-keys).",
        ),
        ("tls-certificate: a, tls-key: b, api-keys: c", "", ""),
        ("allow: [plain-http]", "key", ""),
        ("allow: [plain-http, no-keys]", "", ""),
        ("allow: [plain-graph]", "key", "no TLS: "),
        ("credentials: a", "key", "no TLS: "),
    ],
)
def test_an_unprotected_api_is_refused(tmp_path: Path, security: str, keys: str, expected: str) -> None:
    text = GOOD.replace("  port: 8000", "  host: 0.0.0.0") + f"Security: {{{security}}}\n"
    env = {"PDSERVE_API_KEYS": keys}
    if not expected:
        read(tmp_path, text, env)
        return
    (found,) = problems(tmp_path, text, env)
    start = "FILE:5: Frontend.host is 0.0.0.0, which other machines reach, but the API has "
    assert found.startswith(start + expected)
