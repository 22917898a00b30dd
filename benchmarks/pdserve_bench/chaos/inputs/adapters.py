"""Unload a LoRA adapter under load. Earlier requests get its outputs, even if their worker dies; later ones get 404."""

import asyncio

import httpx

from pdserve.config.lora_modules import static_adapters
from pdserve_bench.chaos.inputs.features import answers, begin, compare, count_running, of_text
from pdserve_bench.chaos.processes.faults import Harm, Target, harm
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.scene import Fault, Scene

NAME = "chaos"
ROUNDS = 3
CONNECTIONS = 20
"""Enough connections to reach every frontend that shares the port."""
POLL_INTERVAL = 0.01


async def unload(scene: Scene) -> float | None:
    """Load an adapter of the graph's file under a second name and unload that; the first gives the right outputs."""
    assert scene.config.decode is not None
    adapters, seconds = static_adapters(scene.config.decode.engine_args), None
    if not adapters:
        raise Cannot("the graph's file has no adapter (lora-modules)")
    (known, path), *_ = adapters.items()
    bodies = of_text(scene)
    right = await answers(scene, [{**body, "model": known} for body in bodies])
    for turn in range(ROUNDS):
        await _post(scene, "load", {"lora_name": NAME, "lora_path": path})
        await _until_listed(scene)
        asked, running = begin(
            scene, [{**body, "model": NAME, "cache_salt": f"{NAME}-{turn}"} for body in bodies]
        )
        while not running.done() and not all(each.arrivals for each in asked):  # noqa: ASYNC110
            await asyncio.sleep(POLL_INTERVAL)
        count_running(scene, asked)
        await _post(scene, "unload", {"lora_name": NAME})
        if turn == ROUNDS - 1:
            seconds = await harm(scene, Target.DECODE, Harm.KILL)
        await running
        compare(scene, [each.error or each.tokens for each in asked], right)
        (late,), asking = begin(scene, [{**bodies[0], "model": NAME}])
        await asking
        if late.status != 404:
            scene.amiss.append(f"a request for an unloaded adapter got status {late.status}, not 404")
    return seconds


async def _post(scene: Scene, what: str, body: dict[str, str]) -> None:
    """Raises Cannot if the graph does not allow loading adapters."""
    async with httpx.AsyncClient(base_url=scene.running.graph.url, timeout=90, trust_env=False) as client:
        answer = await client.post(f"/v1/{what}_lora_adapter", json=body)
    if answer.status_code == 404 and what == "load":
        raise Cannot("loading adapters is disabled: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    if answer.status_code != 200:
        scene.amiss.append(f"{what} of an adapter got status {answer.status_code}: {answer.text}")


async def _until_listed(scene: Scene) -> None:
    """Wait until all frontends, which share a port, list the adapter: only one of them was asked to load it."""
    listed = 0
    async with asyncio.timeout(scene.options.recover_within):
        while listed < CONNECTIONS:
            async with httpx.AsyncClient(base_url=scene.running.graph.url, trust_env=False) as client:
                found = (await client.get("/v1/models")).json()["data"]
            listed = listed + 1 if NAME in {each["id"] for each in found} else 0


ADAPTER_UNLOAD = Fault(
    "adapter-unload",
    "a LoRA adapter is unloaded during its requests, three times; the last time a decode worker is killed",
    unload,
    kills_decode=True,
)
