"""A LoRA adapter that is unloaded under load: what asks for it by then has its answers, at other workers too, and what
asks for it later does not get another's."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import httpx

from pdserve.config.adapters import static_adapters
from pdserve.records import Role
from pdserve_bench.chaos.questions import Attempt, Case, endless, prompt_lengths
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.client import LoadClient

NAME = "chaos"
ROUNDS = 3
AT_ONCE = 6
MANY = 20
"""connections, which reach each of the frontends"""
LOOK_EVERY = 0.01
"""seconds"""
OUTPUT = 400
"""tokens of an answer, so that it is not over when its adapter is"""


async def unload(scene: Scene) -> float | None:
    """The adapter is one of the graph's file, under another name: so the right answers are known."""
    assert scene.config.decode is not None
    adapters, within = static_adapters(scene.config.decode.engine_args), scene.options.patience
    if not adapters:
        raise LookupError("the graph's file names no adapter (lora-modules)")
    (known, path), *_ = adapters.items()
    client = LoadClient(scene.running.graph.url)
    cases = [replace(case, stream=True, max_tokens=OUTPUT) for case in _cases(scene)]
    right = await _answers(client, known, cases, "alone", within)
    for turn in range(ROUNDS):
        await _post(scene, "load", {"lora_name": NAME, "lora_path": path})
        await _until_listed(scene)
        asked = [Attempt.of(replace(case, salt=f"{NAME}-{turn}"), NAME) for case in cases]
        running = asyncio.gather(*(client.ask(attempt, within) for attempt in asked))
        while not running.done() and not all(attempt.arrivals for attempt in asked):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY)
        await _post(scene, "unload", {"lora_name": NAME})
        scene.say(f"{NAME} is unloaded while {sum(not attempt.ended for attempt in asked)} requests have it")
        await _kill_decode(scene)
        await running
        for attempt, expected in zip(asked, right, strict=True):
            if attempt.error or attempt.tokens != expected:
                scene.amiss.append(
                    f"a request of an adapter that was unloaded: {attempt.error or 'wrong tokens'}"
                )
        late = Attempt.of(cases[0], NAME)
        await client.ask(late, within)
        if late.status != 404:
            scene.amiss.append(f"a request for an adapter that is not there was answered {late.status}")
        await scene.recovery()
    return await scene.recovery()


def _cases(scene: Scene) -> list[Case]:
    lengths = prompt_lengths(scene.config, 2048)
    return list(islice(endless(lengths, scene.options.seed + scene.turn), AT_ONCE))


async def _answers(
    client: LoadClient, model: str, cases: list[Case], salt: str, within: float
) -> list[list[int]]:
    found = []
    for case in cases:
        attempt = Attempt.of(replace(case, salt=salt), model)
        await client.ask(attempt, within)
        if attempt.error:
            raise LookupError(f"the undisturbed graph failed a request of {model}: {attempt.error}")
        found.append(attempt.tokens)
    return found


async def _post(scene: Scene, what: str, body: dict[str, str]) -> None:
    """Raises LookupError where the graph does not allow it."""
    async with httpx.AsyncClient(base_url=scene.running.graph.url, timeout=90, trust_env=False) as client:
        answer = await client.post(f"/v1/{what}_lora_adapter", json=body)
    if answer.status_code == 404 and what == "load":
        raise LookupError("set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: nothing may be loaded at run time")
    if answer.status_code != 200:
        scene.amiss.append(f"{what} of an adapter was answered {answer.status_code}: {answer.text}")


async def _until_listed(scene: Scene) -> None:
    """By all frontends, which share a port: those that were not asked to load it read of it a moment later."""
    listed = 0
    async with asyncio.timeout(scene.options.recover_within):
        while listed < MANY:
            async with httpx.AsyncClient(base_url=scene.running.graph.url, trust_env=False) as client:
                found = (await client.get("/v1/models")).json()["data"]
            listed = listed + 1 if NAME in {each["id"] for each in found} else 0


async def _kill_decode(scene: Scene) -> None:
    workers = await scene.watch.instances(Role.DECODE)
    if len(workers) > 1:
        scene.gone.add(workers[0].id)
        with suppress(ProcessLookupError):
            os.kill(workers[0].pid, signal.SIGKILL)


ADAPTER_UNLOAD = Fault(
    "adapter-unload",
    "a LoRA adapter is unloaded while requests have it, and one of their decode workers killed; three times",
    unload,
    kills_decode=True,
)
