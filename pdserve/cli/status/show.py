"""`pdserve status`: once, or as it changes."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

from rich.console import Console
from rich.live import Live

from pdserve.cli.status.find import Found, NoGraph
from pdserve.cli.status.table import as_dict, render
from pdserve.errors import RegistryUnavailable
from pdserve.registry import connect
from pdserve.registry.view import View


async def show(graph: Found, as_json: bool, watch: bool) -> int:
    """The exit code: 1 where no instance is there. Raises NoGraph where etcd does not answer."""
    async with AsyncExitStack() as stack:
        try:
            registry = await stack.enter_async_context(connect(graph.etcd, graph.namespace))
            view = await stack.enter_async_context(View(registry))
        except RegistryUnavailable as error:
            raise NoGraph(f"{error}: no graph runs there.") from None
        if watch:
            await _watch(view, graph, as_json)
        elif as_json:
            print(json.dumps(as_dict(view, graph), indent=2))
        else:
            Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(render(view, graph))
        if not view.instances():
            print(f"pdserve: nothing runs in namespace {graph.namespace} of {graph.etcd}.", file=sys.stderr)
            return 1
    return 0


async def _watch(view: View, graph: Found, as_json: bool) -> None:
    """Until cancelled; with JSON, one line for each change."""
    if as_json:
        async for _ in view.changes():
            print(json.dumps(as_dict(view, graph)), flush=True)
    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        async for _ in view.changes():
            live.update(render(view, graph), refresh=True)
            await asyncio.sleep(0.1)  # a busy graph changes more often than anybody can read
