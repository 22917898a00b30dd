"""Greedy clients, each kind with its own API key, and the latency of a well-behaved client beside them.

python -m pdserve_bench.fuzz --attack [KIND,...] [--seconds 600] [--real]

The graph has https, API keys and two frontends. The canary client first runs without attackers, then with them: its
longest wait for a token must not grow by more than `MAX_EXTRA_WAIT`, and its responses must be right. The attackers run
in a process with lower priority, because in reality they would not share the machine.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from pdserve.security.credentials import create
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.client import HttpConnection, post, send_unread
from pdserve_bench.endpoint import key_headers
from pdserve_bench.fuzz.fuzzer import Fuzzer, FuzzFinding, FuzzReport
from pdserve_bench.graphs.launch import ServerRun, started
from pdserve_bench.graphs.simulated import simulated

SIMULATED = simulated(
    {"step-seconds": 0.02, "prefill-rate": 50000},
    decode={"max-num-seqs": 32},
    common={"num-gpu-blocks-override": 8192},
)
"""As slow as real engines without a GPU: a response of `OUTPUT` tokens takes half a minute."""
MAX_EXTRA_WAIT = 1.0
"""Seconds. It is a finding if attackers prolong the canary's longest wait for a token by more."""
QUIET_SECONDS = 20.0
"""Seconds without attackers."""
FRONTENDS = 2
CANARY = "the client beside"
OUTPUT = 1500
"""Tokens of a long response, if the model's context allows."""
PATIENCE = 60.0
"""Timeout of an attacker's request in seconds."""
NICE = 10
RETRY_SECONDS = 0.05
"""Seconds between two requests of an attacker, because refusals are immediate."""


@dataclass
class Attackers:
    url: str
    model: str
    max_model_len: int
    statuses: Counter[str] = field(default_factory=Counter)
    """Counts of requests by kind of client and result."""

    def __post_init__(self) -> None:
        self._dice = Random(4711)

    async def run(self, kinds: Iterable[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                clients, attack = KINDS[kind]
                for _ in range(clients):
                    group.create_task(self._again(kind, attack))

    async def _again(self, kind: str, attack: "Attack") -> None:
        while True:
            status = "unfinished"
            try:
                async with asyncio.timeout(PATIENCE):
                    status = await attack(self, key_headers(_key(kind)))
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                status = type(error).__name__
            finally:
                self.statuses[f"{kind}: {status}"] += 1
            await asyncio.sleep(RETRY_SECONDS)

    # the kinds

    async def unread(self, headers: dict[str, str]) -> str:
        """Open a stream, never read it, and close it after half of `PATIENCE`."""
        request = post(self.url, self._body(stream=True), headers=headers)
        with closing(await asyncio.to_thread(send_unread, self.url, request)):
            await asyncio.sleep(PATIENCE / 2)
        return "held"

    async def many(self, headers: dict[str, str]) -> str:
        return await self._ask(self._body(n=128, temperature=1.0), headers)

    async def fixed(self, headers: dict[str, str]) -> str:
        """Use a stream that cannot be migrated, because its sampling looks back at its tokens."""
        return await self._ask(self._body(stream=True, presence_penalty=0.1), headers)

    async def streams(self, headers: dict[str, str]) -> str:
        return await self._ask(self._body(stream=True), headers)

    async def prompts(self, headers: dict[str, str]) -> str:
        """Send a request with a hundred copies of one long prompt, which is a new one half of the time."""
        prompt = [self._dice.choice([300, self._dice.randint(301, 999)])] * (self.max_model_len - 96)
        return await self._ask(self._body(prompt=[prompt] * 100, max_tokens=1), headers)

    async def logprobs(self, headers: dict[str, str]) -> str:
        prompt = [300] * (self.max_model_len - 96)
        return await self._ask(self._body(prompt=prompt, n=64, prompt_logprobs=5, max_tokens=1), headers)

    def _body(self, **fields: object) -> dict[str, object]:
        prompt = [self._dice.randint(300, 999) for _ in range(16)]
        tokens = min(OUTPUT, self.max_model_len - 64)
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}

    async def _ask(self, body: dict[str, object], headers: dict[str, str]) -> str:
        """Read the whole response."""
        connection = await HttpConnection.open(self.url, body, headers=headers)
        try:
            status = await connection.status()
            await connection.lines(lambda _: False)
            return str(status)
        finally:
            connection.abort()


Attack = Callable[[Attackers, dict[str, str]], Awaitable[str]]
KINDS: dict[str, tuple[int, Attack]] = {
    "unread": (100, Attackers.unread),
    "many": (2, Attackers.many),
    "streams": (60, Attackers.streams),
    "fixed": (60, Attackers.fixed),
    "prompts": (2, Attackers.prompts),
    "logprobs": (2, Attackers.logprobs),
}
"""Number of clients and their action, by kind."""


async def attacked(
    file: Path,
    folder: Path,
    kinds: list[str],
    seconds: float,
    say: Callable[[str], None],
    beyond: float = MAX_EXTRA_WAIT,
) -> FuzzReport:
    made = create(folder / "tls")
    os.environ["SSL_CERT_FILE"] = str(made.authority)
    security = {"tls-certificate": str(made.certificate), "tls-key": str(made.key)}
    keys = {"PDSERVE_API_KEYS": ",".join(map(_key, [CANARY, *KINDS]))}
    async with started(
        file,
        folder,
        say,
        dtype="float32",
        thresholds=True,
        frontends=FRONTENDS,
        security=security,
        variables=keys,
    ) as running:
        fuzzer = Fuzzer(running.graph, running.state_dir / "logs", say, key_headers(_key(CANARY)))
        async with fuzzer.watching() as load:
            await asyncio.sleep(QUIET_SECONDS)
            quiet, _ = _longest(load, 0)
            asked = len(load.done)
            child = _attackers(fuzzer, folder, await fuzzer.max_model_len(), kinds)
            child.start()
            say(
                f"at most {quiet:.2f} s between tokens of {asked} requests; starting attackers: {', '.join(kinds)}"
            )
            await _watch(fuzzer, load, asked, seconds)
            await child.stop()
        add_statuses(fuzzer.report, child.text)
    longest, slowest = _longest(load, asked)
    if longest > quiet + beyond:
        what = f"the canary waited {longest:.2f} s for a token ({slowest}), without attackers at most {quiet:.2f} s"
        fuzzer.report.findings.append(FuzzFinding(what))
    return fuzzer.report


def _attackers(fuzzer: Fuzzer, folder: Path, max_model_len: int, kinds: list[str]) -> ServerRun:
    told = json.dumps([fuzzer.graph.url, fuzzer.graph.model, max_model_len, kinds])
    command = ["nice", "-n", str(NICE), sys.executable, "-m", "pdserve_bench.fuzz.attack", told]
    return ServerRun(command, folder / "attackers.log")


async def _watch(fuzzer: Fuzzer, load: JudgedLoad, first: int, seconds: float) -> None:
    for _ in range(max(1, round(seconds / 10))):
        await asyncio.sleep(min(10, seconds))
        longest, slowest = _longest(load, first)
        fuzzer.say(f"{len(load.done) - first} requests, longest wait {longest:.2f} s ({slowest})")


def _longest(load: JudgedLoad, first: int) -> tuple[float, str]:
    """Return the canary's longest wait for a token from request `first` on, and that request's id."""
    asked = [attempt for attempt in (*load.done[first:], *load.running) if attempt.case.stream]
    return max(((attempt.longest_wait, attempt.request_id) for attempt in asked), default=(0.0, ""))


def _key(client: str) -> str:
    return f"key-of-{client.replace(' ', '-')}-attacked"


def add_statuses(report: FuzzReport, text: str) -> None:
    """Add the counts in the last JSON line of the attackers' output. Without one, report a finding."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            report.statuses.update(msgspec.json.decode(line, type=dict[str, int]))
            return
    said = text.strip()[-300:] or "nothing"
    report.findings.append(FuzzFinding(f"the attackers ended without a report; they said: {said}"))


async def _main() -> None:
    url, model, max_model_len, kinds = json.loads(sys.argv[1])
    attackers = Attackers(url, model, max_model_len)
    try:
        await attackers.run(kinds)
    finally:
        print(json.dumps(attackers.statuses), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main())
