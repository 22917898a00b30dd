"""Finds what other machines can reach without protection. A file with any of it is refused, unless `Security.allow`
accepts it."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.command import command
from pdserve.config.schema import Allowance, FrontendConfig, GraphSection, SecuritySection
from pdserve.ports import is_loopback, servers_of

_MAKE = f"make credentials (`{command('credentials FOLDER')}`) and set Security.credentials"


@dataclass(frozen=True)
class Opening:
    section: str
    key: str
    """of the address"""
    what: str
    """the problem, as the end of a sentence that begins with the key"""
    advice: str
    allowances: tuple[Allowance, ...]
    """all needed to accept it; empty: it cannot be accepted"""

    def allowed(self, security: SecuritySection) -> bool:
        return bool(self.allowances) and set(self.allowances) <= set(security.allow)

    @property
    def problem(self) -> str:
        otherwise = f", or accept it with Security.allow: [{', '.join(self.allowances)}]"
        return f"{self.what}: {self.advice}{otherwise if self.allowances else ''}."


def openings(
    graph: GraphSection, frontend: FrontendConfig | None, security: SecuritySection, keys: bool
) -> Iterator[Opening]:
    """All openings, allowed or not. `keys`: whether the API requires a key."""
    if security.credentials is None and (
        graph.nats or graph.etcd
    ):  # else `serve` starts both, and makes some
        yield from _of_graph(graph)
    if frontend is not None and not is_loopback(frontend.host):
        lacks: dict[Allowance, tuple[str, str]] = {}
        if not keys:
            lacks["no-keys"] = ("keys", "Security.api-keys (or PDSERVE_API_KEYS)")
        if security.tls_certificate is None:
            lacks["plain-http"] = ("TLS", "Security.tls-certificate and tls-key")
        if lacks:
            missing = " and no ".join(name for name, _ in lacks.values())
            what = f"is {frontend.host}, which other machines reach, but the API has no {missing}"
            advice = f"set {' and '.join(keys for _, keys in lacks.values())}"
            yield Opening("Frontend", "host", what, advice, tuple(lacks))


def _of_graph(graph: GraphSection) -> Iterator[Opening]:
    named = [("nats", "tls", each) for each in servers_of(graph.nats)]
    named += [("etcd", "https", each) for each in servers_of(graph.etcd)]
    for key, scheme, address in named:
        if address.startswith(f"{scheme}://"):
            what = f"is {address}, which asks for TLS, but the graph has no credentials"
            yield Opening("Graph", key, what, _MAKE, ())
        elif not is_loopback(_host(address)):
            what = f"is {_host(address)}, which is reached over the network, but nothing there would be encrypted"
            yield Opening("Graph", key, what, _MAKE, ("plain-graph",))
    if not is_loopback(graph.host):
        what = f"is {graph.host}, where other machines reach the workers' streams, but the graph has no credentials"
        yield Opening("Graph", "host", what, _MAKE, ("plain-graph",))


def _host(address: str) -> str:
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""
