"""The servers that `serve` brings itself, where the configuration names no others; watched like the roles."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.supervisor.backoff import GiveUp, Life, Policy, decide
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.keeper import GaveUp
from pdserve.supervisor.process import Ended
from pdserve.supervisor.server_process import ServerProcess

log = logging.getLogger(__name__)


@asynccontextmanager
async def needed_servers(config: Config) -> AsyncIterator[list[ServerProcess]]:
    """Those that the configuration leaves to us, running; stopped in the opposite order, etcd before NATS."""
    async with AsyncExitStack() as stack:
        servers: list[ServerProcess] = []
        if config.nats is None:
            servers.append(await stack.enter_async_context(EmbeddedNats(config.state_dir)))
        if config.etcd is None:
            servers.append(await stack.enter_async_context(EmbeddedEtcd(config.state_dir)))
        yield servers


async def keep(server: ServerProcess, guardian: Guardian, policy: Policy) -> None:
    """Bring a server back, on the same port and data, whenever it ends; until cancelled. The graph goes on
    without it meanwhile. Raises GaveUp."""
    lives: list[Life] = []
    while True:
        started, pid = time.monotonic(), server.pid
        assert pid is not None
        guardian.watch(pid)
        code = await server.wait()
        guardian.forget(pid)
        lives.append(Life(started, time.monotonic(), ready=True, end=Ended(code)))
        await _restart(server, lives, policy)


async def _restart(server: ServerProcess, lives: list[Life], policy: Policy) -> None:
    while True:
        match decide(lives, policy):
            case GiveUp(reason):
                raise GaveUp(f"{server.name} ended ({lives[-1].end}); not started again, for {reason}.")
            case decision:
                delay = decision.delay
        log.error("%s ended (%s), starts again in %g s", server.name, lives[-1].end, delay)
        await asyncio.sleep(delay)
        started = time.monotonic()
        try:
            await server.restart()
        except ConfigError as error:
            log.error("%s", error)
            lives.append(Life(started, time.monotonic(), ready=False, end=Ended(1)))
        else:
            log.info("%s is back at %s", server.name, server.url)
            return
