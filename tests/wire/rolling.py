"""A rolling upgrade under load. Roles of one build start without `serve`, on one NATS and etcd. One by one they are
replaced by roles of the next build, as on hosts that are upgraded in turn. Every answer is compared, token for token.

Workers end before their successors start, because there is no second GPU for them. A frontend ends after its clients
move to its successor, as behind a load balancer.
"""

import asyncio
import io
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pdserve_bench.chaos import questions
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.questions import Case
from pdserve_bench.chaos.scorecard import Row, score
from pdserve_bench.client import LoadClient
from pdserve_bench.graphs.launch import PDSERVE, ServerRun, derive, with_thresholds
from pdserve_bench.graphs.simulated import write
from pdserve_bench.graphs.watch import GraphWatch

from pdserve.config.load import load as load_config
from pdserve.config.schema import Config
from pdserve.contract.records import Role
from pdserve.observe.graph_state import slot_name
from pdserve.supervisor.processes.exits import wait_for_exit
from pdserve.supervisor.processes.readiness import until_frontends_ready
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import Unavailable
from pdserve.util.net import free_port

ROOT = Path(__file__).parents[2]
WORKERS = {Role.PREFILL: 2, Role.DECODE: 2}
PATIENCE = 120.0
"""seconds after which a request counts as unanswered"""
REMOTE_WITHIN = 60.0
"""seconds after a replacement within which a prompt must be prefilled remotely"""
RELEASE_0_1_0 = "40fa7c474af0c230c0e4dd95fd41a9e90ce8340b"
ANSWERS = """
SimModel.next_token = lambda self, context, salt=0: (
    self.first_token + zlib.crc32(struct.pack(f"<{len(context) + 1}q", *context, salt)) % self.tokens
)
"""
"""Code added to `RELEASE_0_1_0`: its simulated engines generate the tokens of newer ones, because both builds must
serve one model."""
SETTLE = 40.0
"""Seconds until all KV must be free: longer than a KV lease."""


def build_of(commit: str, folder: Path) -> Path:
    """Unpack the package as it is in this commit. Raises Unavailable if this clone lacks it."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "pdserve"], capture_output=True, check=False
    )
    if archive.returncode:
        raise Unavailable(f"no build of {commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    if commit == RELEASE_0_1_0:
        with (folder / "pdserve/engine/sim/model.py").open("a") as model:
            model.write(ANSWERS)
    return folder


@dataclass
class Rolled:
    """A graph of roles without `serve`, each of some build. Their files `0.yaml` and `1.yaml` in `folder` differ in the
    frontend's port."""

    folder: Path
    urls: tuple[str, str]
    watch: GraphWatch
    say: Callable[[str], None]
    running: dict[str, ServerRun] = field(default_factory=dict)
    """by slot"""

    async def start(self, role: Role, index: int, build: Path) -> None:
        """Start a role, and return when it is registered. Raises ConfigError and Unavailable."""
        name = f"{role.value}-{index}"
        run = ServerRun(
            [*PDSERVE, role.value, "-f", str(self.folder / f"{index}.yaml"), "--index", str(index)],
            self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*')))}.log",
            # not from the working directory, which may be a checkout
            {"PYTHONPATH": str(build), "PYTHONSAFEPATH": "1", "PDSERVE_STATE_DIR": str(self.folder / name)},
        )
        self.running[name] = run
        before = {each.id for each in await self.watch.instances()}

        async def registered() -> bool:
            new = {each.id for each in await self.watch.instances()} - before
            return any(slot_name(each) == name for each in new)

        run.start()
        await run.until(registered, self.say)

    async def end(self, role: Role, index: int) -> None:
        """Stop a role by a drain. Raises Unavailable if its exit code is not 0."""
        run = self.running.pop(f"{role.value}-{index}")
        run.process.terminate()
        if code := await wait_for_exit(run.process):
            raise Unavailable(f"{role.value}-{index} ended with exit code {code}:\n{run.text[-3000:]}")

    async def stop(self) -> None:
        await asyncio.gather(*(run.stop() for run in self.running.values()))

    async def fill(self, build: Path) -> None:
        """Start all workers, and one frontend."""
        slots = [(role, index) for role, count in WORKERS.items() for index in range(count)]
        await asyncio.gather(*(self.start(*slot, build) for slot in [(Role.FRONTEND, 0), *slots]))

    async def replace(self, build: Path, load: JudgedLoad) -> None:
        """Replace the process of each slot in turn with one of this build. After each, wait for a remote prefill,
        except after the last prefill worker: decode workers may read no KV from prefill workers of an older build
        (`records.MIN_KV_WIRE`)."""
        for role, count in WORKERS.items():
            for index in range(count):
                await self.end(role, index)
                await self.start(role, index, build)
                self.say(f"{role.value}-{index} is of {build.name}")
                if role is Role.DECODE or index == 0:
                    await _prefilled_remotely(load)
        old, new = (0, 1) if "frontend-0" in self.running else (1, 0)
        await self.start(Role.FRONTEND, new, build)
        await _until_serving(self.urls[new])
        load.urls = [self.urls[new]]
        await self.end(Role.FRONTEND, old)
        self.say(f"the frontend is of {build.name}")
        await _prefilled_remotely(load)


async def _prefilled_remotely(load: JudgedLoad) -> None:
    since = time.monotonic()
    async with asyncio.timeout(REMOTE_WITHIN):
        await load.until(lambda answer: answer.prefill == "remote" and answer.started > since)


async def upgrade(
    file: Path, first: Path, then: Sequence[Path], folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Start a graph of the build `first`, bring each build in `then` to it, and return a row for each. Raises
    ConfigError, Unavailable and TimeoutError."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(EmbeddedNats(folder / "servers"))
        etcd = await stack.enter_async_context(EmbeddedEtcd(folder / "servers"))
        config, other = (_alone(file, folder / f"{index}.yaml", nats.url, etcd.url) for index in (0, 1))
        watch = await stack.enter_async_context(GraphWatch())
        await watch.move(GraphRecord(os.getpid(), "", "", config.namespace, etcd.url, nats.url))
        rolled = Rolled(folder, (_url(config), _url(other)), watch, say)
        stack.push_async_callback(rolled.stop)
        await rolled.fill(first)
        longest = min(each.max_model_len for each in await watch.learn() if each.max_model_len)
        known, rows = await _cases(config, longest), []
        for build in then:
            url = rolled.urls[0 if "frontend-0" in rolled.running else 1]
            async with JudgedLoad(url, config.served_model_name, known, 8, PATIENCE) as load:
                began = time.monotonic()
                await _prefilled_remotely(load)
                await rolled.replace(build, load)
            left = await watch.leftovers(SETTLE)
            rows.append(score(f"to {build.name}", "each process", load.seen(build.name, began), 0.0, left))
        return rows


async def _cases(config: Config, longest: int) -> Iterator[Case]:
    client, name = LoadClient(_url(config)), config.served_model_name
    await _until_serving(_url(config))
    first = next(questions.endless(questions.prompt_lengths(config, longest), 0))
    await client.ask(questions.Attempt.of(first, name), PATIENCE)
    return await questions.known(
        config, longest, 1, lambda cases: questions.learn(client, name, cases, PATIENCE)
    )


async def _until_serving(url: str) -> None:
    async for _ in until_frontends_ready(url, 1):
        pass


def _url(config: Config) -> str:
    assert config.frontend is not None
    return f"http://127.0.0.1:{config.frontend.port}"


def _alone(file: Path, to: Path, nats: str, etcd: str) -> Config:
    """Write the file for roles without `serve`: with these servers, and remote prefill by length."""
    sections = with_thresholds(derive(file, 2, free_port("127.0.0.1"), free_port("127.0.0.1", 32), "float32"))
    sections["Graph"] |= {"nats": nats, "etcd": etcd}
    return load_config(write(sections, to), {})
