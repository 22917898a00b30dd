"""Live settings: keys in etcd that change a running graph."""

from collections.abc import Mapping, Sequence

from pdserve.cli.status.find import Found
from pdserve.config.findings import or_nearest
from pdserve.config.schema import POLICIES
from pdserve.decode.settings import MAX_THRESHOLD, is_threshold
from pdserve.errors import ConfigError
from pdserve.registry import connect, keys

SETTINGS = {
    "max-local-prefill-length": "tokens; a prompt with more than these to compute goes to a prefill worker",
    "max-prefill-queue-size": "requests; with these many waiting, prefill locally",
    "router": f"how frontends choose a decode worker: {', '.join(POLICIES)}",
}


def check(changes: Mapping[str, str | None]) -> None:
    """None for a value means back to the file's. Raises ConfigError."""
    if problems := [problem for name, value in changes.items() if (problem := _problem(name, value))]:
        raise ConfigError(problems)


def _problem(name: str, value: str | None) -> str | None:
    if name not in SETTINGS:
        hint = or_nearest(name, SETTINGS, f"use one of {', '.join(SETTINGS)}.")
        return f"{name} is no live setting: {hint}"
    if value is None:
        return None
    if name == "router" and value not in POLICIES:
        return f"router={value}: there are {', '.join(POLICIES)}."
    if name != "router" and not is_threshold(value):
        return f"{name}={value[:40]}: it takes a whole number from 0 to {MAX_THRESHOLD}."
    return None


async def change(graph: Found, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Write them; returns what is set then. Raises RegistryUnavailable."""
    async with connect(graph.etcd, graph.namespace) as registry:
        for name, value in changes.items():
            if value is None:
                await registry.delete(keys.setting(name))
            else:
                await registry.put(keys.setting(name), value.encode(), leased=False)
        found = await registry.read(keys.SETTINGS)
    return {key.removeprefix(keys.SETTINGS): value.decode(errors="replace") for key, value in found.items()}


def parse(pairs: Sequence[str], unset: Sequence[str]) -> dict[str, str | None]:
    """`KEY=VALUE` pairs and keys to unset, underscores allowed. Raises ConfigError."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"{pair} is not KEY=VALUE." for pair in wrong])
    changes: dict[str, str | None] = {_key(name): None for name in unset}
    return changes | {_key(name): value.strip() for name, _, value in (pair.partition("=") for pair in pairs)}


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")
