"""The servers that `serve` brings itself, where the configuration names no others; watched like the roles."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.supervisor.backoff import Life, Policy, Restart, decide
from pdserve.supervisor.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.keeper import LIVES
from pdserve.supervisor.process import Ended
from pdserve.tasks import forever

log = logging.getLogger(__name__)

HANGS_AFTER = 60.0
"""seconds without any answer; the graph goes on without a server meanwhile, and for short hangs it is left alone"""
LOOK_EVERY, ANSWER_WITHIN = 5.0, 5.0


@asynccontextmanager
async def needed_servers(config: Config, guardian: Guardian) -> AsyncIterator[list[EmbeddedServer]]:
    """Those that the configuration leaves to us, running; stopped in the opposite order, etcd before NATS."""
    async with AsyncExitStack() as stack:
        servers: list[EmbeddedServer] = []
        if config.nats is None:
            servers.append(await stack.enter_async_context(EmbeddedNats(config.state_dir, guardian=guardian)))
        if config.etcd is None:
            servers.append(await stack.enter_async_context(EmbeddedEtcd(config.state_dir, guardian=guardian)))
        yield servers


async def keep(server: EmbeddedServer, policy: Policy) -> None:
    """Bring a server back, on the same port and data, whenever it ends or hangs; until cancelled. The graph goes on
    without it meanwhile, for as long as it takes."""
    lives: deque[Life] = deque(maxlen=LIVES)
    while True:
        started = time.monotonic()
        watching = asyncio.create_task(
            forever(lambda: _kill_if_it_hangs(server), "server watch", until_done=True)
        )
        try:
            code = await server.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        lives.append(Life(started, time.monotonic(), ready=True, end=Ended(code)))
        await _restart(server, lives, policy)


async def _kill_if_it_hangs(server: EmbeddedServer) -> None:
    """Looks are counted, not seconds: a supervisor that was stopped itself knows nothing."""
    silent = 0.0
    while silent < HANGS_AFTER:
        await asyncio.sleep(LOOK_EVERY)
        silent = 0.0 if await _answers(server) else silent + LOOK_EVERY
    log.error("%s hangs: it has answered nothing for %g s; killing it", server.name, silent)
    server.kill()


async def _answers(server: EmbeddedServer) -> bool:
    """Anything at all: an etcd that says it is ill would not be cured by a restart."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            await server.answers()
    except (OSError, EOFError):
        return False
    return True


async def _restart(server: EmbeddedServer, lives: deque[Life], policy: Policy) -> None:
    while True:
        decision = decide(lives, policy, was_ready=True, role_was_ready=True)
        assert isinstance(decision, Restart)
        delay = decision.delay
        log.error("%s ended (%s), starts again in %g s", server.name, lives[-1].end, delay)
        await asyncio.sleep(delay)
        started = time.monotonic()
        try:
            await server.restart()
        except (ConfigError, OSError) as error:
            log.error("%s", error)
            lives.append(Life(started, time.monotonic(), ready=False, end=Ended(1)))
        else:
            log.info("%s is back at %s", server.name, server.url)
            return
