"""vLLM's own API server with nothing behind it: the baseline of the frontend's benchmark.

    python -m pdserve_bench.hops.vllm_app --step-seconds 0.005 --sequence-seconds 0 --token 316 -- ARGUMENTS OF vLLM

Everything is vLLM's, from its command line to its AsyncLLM, but for the engine core: that is a few lines in this
process which give each request one token per step, always the same one. So all CPU time of this process is that of the
API server. It saves the message from the engine's process against a real one, and where the machine has no CPU time
left, its engine slows down with it, which one in a process of its own does not: then these figures are not comparable.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server import entry
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

_LATE = 0.005
"""seconds by which a step may end late and the next one still begins when it should have, as in the simulated engine"""


class NoEngineCore(EngineCoreClient):  # type: ignore[misc]  # vLLM's base answers NotImplementedError for the rest
    """A step takes so many seconds, and so many more for each request in it."""

    def __init__(self, step_seconds: float, sequence_seconds: float, token: int) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._step, self._sequence, self._token = step_seconds, sequence_seconds, token
        self._running: dict[str, _Answer] = {}
        self._work = asyncio.Event()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._steps = asyncio.create_task(self._run())

    async def _run(self) -> None:
        due = 0.0
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            batch = list(self._running.values())
            now = time.monotonic()
            due = max(due, now - _LATE) + self._step + self._sequence * len(batch)
            await asyncio.sleep(due - now)
            outputs = [self._next(answer) for answer in batch if answer.request_id in self._running]
            if outputs:
                self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()))

    def _next(self, answer: "_Answer") -> EngineCoreOutput:
        output = EngineCoreOutput(answer.request_id, [self._token])
        if not answer.tokens:
            output.prefill_stats = PrefillStats(answer.prompt, answer.prompt)
        answer.tokens += 1
        if answer.tokens >= answer.most:
            output.finish_reason = FinishReason.LENGTH
            del self._running[answer.request_id]
        return output

    # what AsyncLLM calls

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        most = request.sampling_params.max_tokens if request.sampling_params else 1
        self._running[request.request_id] = _Answer(
            request.request_id, len(request.prompt_token_ids or ()), most
        )
        self._work.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def shutdown(self, timeout: float | None = None) -> None:
        self.resources.engine_dead = True
        self._steps.cancel()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None: ...

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return bool(self._running)


@dataclass(slots=True)
class _Answer:
    request_id: str
    prompt: int
    most: int
    tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--sequence-seconds", type=float, default=0.0)
    parser.add_argument("--token", type=int, required=True, help="id of the token that is generated")
    parser.add_argument("vllm", nargs="*", help="arguments of vLLM's own server, after --")
    args = parser.parse_args()

    def no_core(**_: Any) -> NoEngineCore:
        return NoEngineCore(args.step_seconds, args.sequence_seconds, args.token)

    EngineCoreClient.make_async_mp_client = staticmethod(no_core)
    sys.argv = [entry.__file__ or "", *args.vllm]
    entry.main()


if __name__ == "__main__":
    main()
