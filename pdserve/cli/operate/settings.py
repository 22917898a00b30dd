"""`pdserve set`: changes live settings, which are keys in etcd, in a running graph."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from pdserve.cli.find import GraphAddress, find_graph
from pdserve.cli.options import CredentialsFolder, Etcd, GraphFile, Namespace
from pdserve.config.files.yaml_tree import did_you_mean
from pdserve.contract.live_settings import SETTINGS, explain_settings, merge_files, value_error
from pdserve.registry import connect, keys
from pdserve.registry.view import RegistryView
from pdserve.util.errors import ConfigError


def change_settings(
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True)] = None,
    unset: Annotated[list[str] | None, typer.Option(metavar="KEY", help="back to the file's value")] = None,
    file: GraphFile = None,
    etcd: Etcd = None,
    namespace: Namespace = None,
    credentials: CredentialsFolder = None,
) -> int:
    """Change settings of a running graph at once, without a restart. They are stored in etcd and win over the file
    until they are unset, also after a restart. If `serve` runs its own etcd, serving another file drops them.
    Setting max-local-prefill-length or max-prefill-queue-size, but no policy, selects policy: threshold. Without
    arguments, show the settings.

    examples:
      pdserve set                                   show all settings
      pdserve set max-local-prefill-length=256      longer prompts go to a prefill worker
      pdserve set router=kv max-prefill-queue-size=4
      pdserve set --unset router                    back to the file's value
    """
    wanted = _parse(changes or [], unset or [])
    if problems := [found for name, value in wanted.items() if (found := _problem(name, value))]:
        raise ConfigError(problems)
    shown = asyncio.run(_change(find_graph(file, etcd, namespace, credentials), wanted))
    for name, what in SETTINGS.items():
        print(f"{name} = {shown[name]}   # {what}")
    return 0


def _parse(pairs: Sequence[str], unset: Sequence[str]) -> dict[str, str | None]:
    """Parse `KEY=VALUE` pairs and keys to unset, which become None. Keys may have underscores. Raises ConfigError."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"{pair} is not KEY=VALUE." for pair in wrong])
    changes: dict[str, str | None] = {_key(name): None for name in unset}
    values = {_key(name): value.strip(" ") for name, _, value in (pair.partition("=") for pair in pairs)}
    if both := changes.keys() & values.keys():
        raise ConfigError([f"{name} is both set and unset: choose one." for name in sorted(both)])
    return changes | values


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _problem(name: str, value: str | None) -> str | None:
    if name not in SETTINGS:
        hint = did_you_mean(name, SETTINGS, f"use one of {', '.join(SETTINGS)}.")
        return f"{name} is not a live setting: {hint}"
    if value is not None and (wanted := value_error(name, value)):
        return f"{name}={value[:40]!r}: it takes {wanted}."
    return None


async def _change(graph: GraphAddress, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Write the changes; return the value of each setting. Raises RegistryUnavailable."""
    async with connect(graph.etcd, graph.namespace, graph.credentials) as registry:
        for name, value in changes.items():
            if value is None:
                await registry.delete(keys.setting(name))
            else:
                await registry.put(keys.setting(name), value.encode(), leased=False)
        async with RegistryView(registry, keys.INSTANCES, keys.SETTINGS) as view:
            file = merge_files([instance.settings for instance in view.instances()])
            return explain_settings(file, view.settings())
