"""What a worker does before it tells anybody that it is there: it has its engine do what it will be asked for, so that
what an engine only does at its first prefill, step or hand-over of KV is done, or has failed, before a client comes."""

import asyncio
import logging
import random
import secrets
import time

from pdserve.engine.base import Engine, EngineFacts, Output, Step
from pdserve.errors import EngineDead
from pdserve.messages import KvHandle, Role
from pdserve.process.liveness import watch_engine

log = logging.getLogger(__name__)

STEPS = 3
"""tokens that a decode worker generates: the first by the prefill, the others by decode steps"""
_IDS = range(16, 256)
"""token ids that every vocabulary has"""


def unique_prompt(facts: EngineFacts) -> list[int]:
    """A bit more than a KV block, and in no prefix cache."""
    length = min(facts.block_size + 2, facts.max_model_len - STEPS - 1, facts.kv_tokens - STEPS - 1)
    chance = random.SystemRandom()
    return [chance.choice(_IDS) for _ in range(max(1, length))]


async def self_test(engine: Engine, role: Role) -> None:
    """Before anybody else reads the engine's steps. Raises EngineDead where it dies, fails or hangs."""
    began = time.monotonic()
    work = asyncio.ensure_future(_prefill(engine) if role is Role.PREFILL else _decode(engine))
    watch = asyncio.ensure_future(watch_engine(engine))
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            watch.result()
        work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    if not await engine.all_blocks_free():
        log.warning("KV blocks are still held after the engine's self-test")
    log.info("the engine did its first work in %.2f s", time.monotonic() - began)


async def _decode(engine: Engine) -> None:
    name = f"self-test-{secrets.token_hex(4)}"
    await engine.generate(name, unique_prompt(engine.facts), engine.plain_body(STEPS), None)
    await _last_output(engine, name)


async def _prefill(engine: Engine) -> None:
    name = f"self-test-{secrets.token_hex(4)}"
    await engine.prefill(name, unique_prompt(engine.facts), engine.plain_body(1))
    handle = (await _last_output(engine, name)).handle
    if handle is None:
        raise EngineDead("the engine's first prefill brought no KV")
    await engine.release(handle)
    await _released(engine, handle)


async def _last_output(engine: Engine, request_id: str) -> Output:
    while True:
        step: Step = await engine.step()
        for output in step.outputs:
            if output.request_id == request_id and output.failed:
                raise EngineDead("the engine failed its first request")
            if output.request_id == request_id and output.finished:
                return output


async def _released(engine: Engine, handle: KvHandle) -> None:
    while handle.request_id not in (await engine.step()).released:
        pass
