"""Finds addresses that other machines can reach without protection, unless `Security.allow` accepts them. Also finds
addresses that ask for TLS in a graph without credentials."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from pdserve.config.schema import Allowance, FrontendConfig, GraphSection, SecuritySection
from pdserve.util.net import is_loopback, split_servers, strip_passwords
from pdserve.util.program import pdserve_command

_MAKE = f"make credentials (`{pdserve_command('credentials FOLDER')}`) and set Security.credentials"
Opening = tuple[str, str, str]
"""Section and key of the address, and the problem, as the end of a sentence that begins with the key."""


def openings(
    graph: GraphSection, frontend: FrontendConfig | None, security: SecuritySection, keys: bool
) -> Iterator[Opening]:
    """Find openings that are not allowed. `keys`: whether the API requires a key. If the file names
    neither `nats` nor `etcd`, the graph needs no credentials here: `serve` makes them."""
    if security.credentials is None and (graph.nats or graph.etcd):
        yield from _of_graph(graph, "plain-graph" in security.allow)
    if frontend is not None and not is_loopback(frontend.host):
        lacks: dict[Allowance, tuple[str, str]] = {}
        if not keys:
            lacks["no-keys"] = ("keys", "Security.api-keys (or PDSERVE_API_KEYS)")
        if security.tls_certificate is None:
            lacks["plain-http"] = ("TLS", "Security.tls-certificate and tls-key")
        if not lacks.keys() <= set(security.allow):
            missing = " and no ".join(name for name, _ in lacks.values())
            what = f"is {frontend.host}, which other machines reach, but the API has no {missing}"
            advice = f"set {' and '.join(keys for _, keys in lacks.values())}"
            yield "Frontend", "host", f"{what}: {advice}, {_or_accept(*lacks)}."


def _of_graph(graph: GraphSection, allowed: bool) -> Iterator[Opening]:
    """Find addresses that need credentials. If `allowed`, only those that ask for TLS do."""
    plain = f"{_MAKE}, {_or_accept('plain-graph')}."
    named = [("nats", "tls", each) for each in split_servers(graph.nats)]
    named += [("etcd", "https", each) for each in split_servers(graph.etcd)]
    for key, scheme, address in named:
        if address.startswith(f"{scheme}://"):
            what = f"is {strip_passwords(address)}, which asks for TLS, but the graph has no credentials"
            yield "Graph", key, f"{what}: {_MAKE}."
        elif not allowed and not is_loopback(_host(address)):
            what = f"is {_host(address)}, on another machine, but the connection would not be encrypted"
            yield "Graph", key, f"{what}: {plain}"
    if not allowed and not is_loopback(graph.host):
        what = f"is {graph.host}, where other machines reach the workers' streams, but the graph has no credentials"
        yield "Graph", "host", f"{what}: {plain}"


def _or_accept(*allowances: Allowance) -> str:
    return (
        f"or accept it with Security.allow: [{', '.join(allowances)}] (PDSERVE_ALLOW={','.join(allowances)})"
    )


def _host(address: str) -> str:
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""
