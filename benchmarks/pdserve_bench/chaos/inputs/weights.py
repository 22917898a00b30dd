"""Replace a model's weight files and restart one role at a time, so that workers with different weights serve one name.
Each output must come from one set of weights, and remote prefill resumes once both roles have the same."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.contract.records import Role
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.questions import answers
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.client import LoadClient
from pdserve_bench.graphs.launch import StartedGraph

_SIZES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element by safetensors' type."""
_CHANGED = "v_proj.weight"
_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))
"""Translation table that flips the sign bit of a number's highest byte."""


async def mix(scene: Scene) -> float | None:
    """Switch to other weights, with prefill workers first, and back, with decode workers first."""
    running = scene.running
    if not isinstance(running, StartedGraph) or running.model is None:
        raise Cannot("needs a copy of the model's folder: start the graph here, with a small local model")
    if not scene.remote:
        raise Cannot("the graph has no prefill workers")
    with _other_weights(running.model):
        scene.say("wrote other weights to the model's folder")
        await _restart_in_turn(scene, Role.PREFILL, Role.DECODE)
        if scene.pool:
            await _learn(scene)
    scene.say("restored the first weights")
    await _restart_in_turn(scene, Role.DECODE, Role.PREFILL)
    return await scene.recovery()


async def _restart_in_turn(scene: Scene, *roles: Role) -> None:
    for role in roles:
        for instance in await scene.watch.instances(role):
            scene.gone.add(instance.id)
            with suppress(ProcessLookupError):
                os.kill(instance.pid, signal.SIGTERM)
            async with asyncio.timeout(scene.options.recover_within):
                await scene.watch.until_whole(scene.gone, scene.say)
        scene.say(f"restarted all {role.value} workers")
        await asyncio.sleep(scene.options.hold / 3)
    await scene.recovery()


async def _learn(scene: Scene) -> None:
    """Ask for the new weights' outputs, one prompt at a time beside the load."""
    graph = scene.running.graph
    found = await answers(LoadClient(graph.url), graph.model, scene.pool, scene.options.patience)
    scene.load.also_right.update(found)


@contextmanager
def _other_weights(folder: Path) -> Iterator[None]:
    """Change the weights until the context exits. Replaces files instead of overwriting them, because running engines
    may map them."""
    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    try:
        for path, data in before.items():
            _replace(path, turned(data))
        yield
    finally:
        for path, data in before.items():
            _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)


def turned(file: bytes) -> bytes:
    """Flip the sign of all value projections in a safetensors file (length, JSON header, data)."""
    start = 8 + int.from_bytes(file[:8], "little")
    data = bytearray(file)
    for name, tensor in json.loads(file[8:start]).items():
        if name.endswith(_CHANGED):
            size = _SIZES[tensor["dtype"]]
            first, last = (start + offset for offset in tensor["data_offsets"])
            data[first + size - 1 : last : size] = data[first + size - 1 : last : size].translate(_FLIPPED)
    return bytes(data)


MIXED_WEIGHTS = Fault(
    "mixed-weights",
    "other weights in the model's folder; restart of prefill, then decode workers; and back, decode workers first",
    mix,
)
