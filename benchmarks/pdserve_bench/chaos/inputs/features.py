"""Kill processes while a graph uses optional features: speculative decoding, KV from host memory, tensor parallelism,
images, batches. Each feature's own requests run beside the load and must get the same outputs as before."""

import asyncio
import base64
import json
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.config.schema import kebab
from pdserve.contract.records import Role
from pdserve.util.errors import Unavailable
from pdserve_bench.chaos.processes.faults import Harm, Target, Victim, harm
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.processes.restarts import described
from pdserve_bench.chaos.questions import endless, prompt_lengths
from pdserve_bench.chaos.scene import Fault, Scene
from pdserve_bench.client import CHAT, COMPLETIONS, Exchange, LoadClient, completion
from pdserve_bench.graphs.launch import family
from pdserve_bench.graphs.sections import read_sections

Body = Mapping[str, object]
AT_ONCE = 4
LINES = 24
OUTPUT = 300
"""Output tokens: enough that a request still runs when its worker is killed."""
POLL_INTERVAL = 0.01


@dataclass(frozen=True)
class Trial:
    bodies: Callable[[Scene], list[Body]]
    strike: Callable[[Scene], Awaitable[float | None]]
    """Injects the fault and returns the result of `Scene.recovery`."""
    enough: Callable[[list[bool]], bool] = all
    """Whether to strike, given for each request whether it has tokens."""
    prepare: Callable[[Scene, Sequence[Body]], Awaitable[None]] | None = None
    key: str = ""
    """Key of the graph's file that enables the feature."""
    series: tuple[str, ...] = ()
    """Words of a metric's line. The metric grows while the feature is used."""


async def play(scene: Scene, feature: Trial) -> float | None:
    sections = read_sections(Path(scene.running.graph.config))
    if feature.key and feature.key not in {kebab(key) for section in sections.values() for key in section}:
        raise Cannot(_lacking(feature.key))
    bodies = feature.bodies(scene)
    right = await answers(scene, bodies)
    before = await _counted(scene, feature.series)
    if feature.prepare:
        await feature.prepare(scene, bodies)
    asked, running = begin(scene, bodies)
    while not running.done() and not feature.enough([bool(each.arrivals) for each in asked]):  # noqa: ASYNC110
        await asyncio.sleep(POLL_INTERVAL)
    count_running(scene, asked)
    seconds = await feature.strike(scene)
    await running
    compare(scene, [each.error or each.tokens for each in asked], right)
    if feature.enough is any and not any(each.prefill == "remote" for each in asked):
        scene.amiss.append("none of the feature's requests was prefilled remotely")
    after = await _counted(scene, feature.series)
    if feature.series and not any(after[name] > before.get(name, 0) for name in after):
        scene.amiss.append(f"metric did not grow: {' with '.join(feature.series)}")
    return seconds


async def answers(scene: Scene, bodies: Sequence[Body]) -> list[list[int]]:
    """Return the outputs of the undisturbed graph. Raises Unavailable if a request fails."""
    asked, running = begin(scene, [{**body, "cache_salt": "undisturbed"} for body in bodies])
    await running
    if errors := {each.error for each in asked if each.error}:
        raise Unavailable(f"the undisturbed graph failed a request: {errors.pop()}")
    return [each.tokens for each in asked]


def begin(scene: Scene, bodies: Sequence[Body]) -> "tuple[list[Exchange], asyncio.Future[list[None]]]":
    client, within = LoadClient(scene.running.graph.url), 2 * scene.options.patience
    asked = [Exchange(body) for body in bodies]
    paths = [CHAT if "messages" in body else COMPLETIONS for body in bodies]
    jobs = (client.ask(each, within, path) for each, path in zip(asked, paths, strict=True))
    return asked, asyncio.gather(*jobs)


def count_running(scene: Scene, asked: Sequence[Exchange]) -> None:
    """Check that requests are in flight when the fault happens."""
    running = sum(not each.ended for each in asked)
    scene.say(f"{running} of the feature's requests in flight")
    if not running:
        scene.amiss.append("none of the feature's requests was in flight")


def compare(scene: Scene, found: Sequence[object], right: Sequence[list[int]]) -> None:
    """Record wrong outputs. An entry of `found` is tokens or an error text."""
    for each, expected in zip(found, right, strict=True):
        if each != expected:
            scene.amiss.append(
                f"a request of the feature: {each if isinstance(each, str) else 'wrong tokens'}"
            )


def of_text(scene: Scene, count: int = AT_ONCE) -> list[Body]:
    lengths = prompt_lengths(scene.config, 2048)
    cases = islice(endless(lengths, scene.options.seed + scene.turn), count)
    model = scene.running.graph.model
    return [replace(case, stream=True, max_tokens=OUTPUT).body(model) for case in cases]


async def _counted(scene: Scene, series: tuple[str, ...]) -> dict[str, float]:
    """Return the metric's sum by instance."""
    pages = await scene.watch.metrics(Role.DECODE, Role.PREFILL) if series else {}
    return {
        instance: sum(value for line, value in page.items() if all(part in line for part in series))
        for instance, page in pages.items()
    }


# KV from host memory


def _conversations(scene: Scene) -> list[Body]:
    """Return prompts that continue a conversation by enough tokens for remote prefill."""
    dice = random.Random(scene.options.seed)
    prompts = [[dice.randint(300, 999) for _ in range(1400)] for _ in range(AT_ONCE)]
    return [completion(scene.running.graph.model, prompt, OUTPUT, cache_salt="kept") for prompt in prompts]


async def _begin_conversations(scene: Scene, bodies: Sequence[Body]) -> None:
    """Ask the first questions, then enough others to evict the first ones' KV from the prefix caches."""
    first = [{**body, "prompt": body["prompt"][:1000], "max_tokens": 8} for body in bodies]  # type: ignore[index]
    others = [{**body, "cache_salt": f"others {turn}"} for turn in range(3) for body in first]
    for body in (*first, *others):
        (asked,), running = begin(scene, [body])
        await running
        if asked.error:
            scene.amiss.append(f"a first question: {asked.error}")


# ranks


async def _kill_rank(scene: Scene) -> float | None:
    """Raises Cannot if no decode worker has a second rank."""
    for worker in await scene.watch.instances(Role.DECODE):
        for process in family(worker.pid):
            if "(VLLM::Worker_TP1" in described(process):
                scene.say(f"{worker.id}: rank 1 is process {process.pid}")
                scene.victims.append(f"rank 1 of {worker.id}")
                scene.gone.add(worker.id)
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
                return await scene.recovery()
    raise Cannot("no decode worker has a second rank (tensor-parallel-size: 2)")


# images


def _of_images(scene: Scene) -> list[Body]:
    """Return requests with an image of noise each, in PPM format."""
    bodies: list[Body] = []
    for number in range(AT_ONCE):
        pixels = random.Random(number).randbytes(3 * 64 * 64)
        url = f"data:image/x-portable-pixmap;base64,{base64.b64encode(b'P6 64 64 255 ' + pixels).decode()}"
        text = {"type": "text", "text": "What is it? " * 30}
        parts = [{"type": "image_url", "image_url": {"url": url}}, text]
        body = completion(scene.running.graph.model, "", OUTPUT)
        del body["prompt"]
        bodies.append(body | {"messages": [{"role": "user", "content": parts}]})
    return bodies


# batches


async def batch(scene: Scene) -> float | None:
    """Kill the frontend that runs a batch. Each line must get exactly one response."""
    assert scene.config.frontend is not None
    if (folder := scene.config.frontend.batches) is None:
        raise Cannot(_lacking("batches"))
    sizes = range(10, OUTPUT + 10, OUTPUT // 10)
    bodies = [
        {**body, "stream": False, "max_tokens": size}
        for body, size in zip(of_text(scene, LINES), cycle(sizes), strict=False)
    ]
    right = await answers(scene, bodies)
    lines = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    async with httpx.AsyncClient(base_url=f"{scene.running.graph.url}/v1", trust_env=False) as client:
        file = await client.post(
            "/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
        )
        asked = {"input_file_id": file.json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        name = (await client.post("/batches", json=asked)).json()["id"]
    async with asyncio.timeout(scene.options.recover_within):
        begun = await _until(scene, name, lambda found: found["request_counts"]["completed"] >= LINES // 5)
    scene.say(f"killing the frontend that works on a batch: {begun['request_counts']}")
    holder = _holder(folder / "lock")
    frontends = await scene.watch.instances(Role.FRONTEND)
    victim = next(Victim(each.id, each.pid) for each in frontends if each.pid == holder)
    seconds = await harm(scene, Target.FRONTEND, Harm.KILL, victim)
    async with asyncio.timeout(scene.options.recover_within):
        ended = await _until(scene, name, lambda found: found["status"] not in ("validating", "in_progress"))
    async with httpx.AsyncClient(base_url=f"{scene.running.graph.url}/v1", trust_env=False) as client:
        text = (await client.get(f"/files/{ended['output_file_id']}/content")).text
    results = sorted(map(json.loads, text.splitlines()), key=lambda result: int(result["custom_id"]))
    if [result["custom_id"] for result in results] != [line["custom_id"] for line in lines]:
        scene.amiss.append(f"a batch of {LINES} lines has {len(results)} answers: {ended['request_counts']}")
    else:
        compare(scene, [result["response"]["body"]["choices"][0]["token_ids"] for result in results], right)
    return seconds


async def _until(scene: Scene, name: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the batch, on a new connection each time, until the condition holds."""
    while True:
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as client:
                found = (await client.get(f"{scene.running.graph.url}/v1/batches/{name}")).json()
            if true(found):
                return dict(found)
        await asyncio.sleep(POLL_INTERVAL)


def _holder(file: Path) -> int:
    """Return the process that holds the lock. Raises LookupError without one."""
    inode = f":{file.stat().st_ino} "
    for line in Path("/proc/locks").read_text().splitlines():
        if inode in line and "->" not in line:
            return int(line.split()[4])
    raise LookupError("no process works on batches")


def _lacking(key: str) -> str:
    return f"the graph's file has no {key}: name this fault with --only to add it"


def _fault(name: str, told: str, feature: Trial, adds: Mapping[str, Body]) -> Fault:
    kills_decode = feature.strike is not _kill_prefill
    return Fault(name, told, partial(play, feature=feature), kills_decode=kills_decode, adds=adds)


_kill_decode = partial(harm, target=Target.DECODE, how=Harm.KILL)
_kill_prefill = partial(harm, target=Target.PREFILL, how=Harm.KILL)
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
_HOST = {"kv-offload": "512MiB", "num-gpu-blocks-override": 450}
"""Prefix cache for all running requests (14,400 tokens with blocks of 32), and several times as much host memory."""
_ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
_FROM_HOST = ("vllm:prompt_tokens_cached_by_source_total", 'source="host"')
_CONVERSATIONS = Trial(_conversations, _kill_decode, all, _begin_conversations, "kv-offload", _FROM_HOST)
_OFFLOAD = {"VllmWorker": _HOST, "PrefillWorker": _HOST}

FEATURES: tuple[Fault, ...] = (
    Fault(
        "batch-kill",
        "SIGKILL of the frontend that works on a batch",
        batch,
        adds={"Frontend": {"batches": "batches"}},
    ),
    _fault(
        "draft-kill",
        "one decode worker that speculates with n-grams: SIGKILL in the middle of answers",
        Trial(of_text, _kill_decode, key="speculative-config", series=_ACCEPTED),
        {"VllmWorker": {"speculative-config": _DRAFTS}},
    ),
    _fault(
        "offload-decode-kill",
        "one decode worker: SIGKILL during conversations whose KV came from host memory",
        _CONVERSATIONS,
        _OFFLOAD,
    ),
    _fault(
        "offload-prefill-kill",
        "one prefill worker: SIGKILL while it loads conversations from host memory",
        replace(_CONVERSATIONS, strike=_kill_prefill, enough=any),
        _OFFLOAD,
    ),
    _fault(
        "rank-kill",
        "a decode worker of two ranks, beside prefill workers of one: SIGKILL of a rank",
        Trial(of_text, _kill_rank, key="tensor-parallel-size"),
        {"VllmWorker": {"tensor-parallel-size": 2}},
    ),
    _fault(
        "image-kill",
        "one prefill worker: SIGKILL while images are prefilled",
        Trial(_of_images, _kill_prefill, any),
        {},
    ),
)
