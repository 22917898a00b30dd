"""With a promised gap, a chunk has the tokens that fit into the gap at the measured speed."""

import math

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.contract.messages import Promise
from pdserve.contract.slo import gap_miss_probability
from pdserve.decode.policy.slo_risk import chunk_of, chunk_without_slo, longest_step
from pdserve.engine.sim.engine import SimEngine
from tests.decode.graph import LONG, SHORT, FrontendStream, WorkerGraph
from tests.decode.virtual import BLOCK, SPEED, Promised, VirtualGraph

USUAL = 256


@pytest.mark.parametrize("plain", [0.001, 0.01, 0.03, 0.059, 0.06, 0.2])
def test_the_longest_step_keeps_the_gap(plain: float) -> None:
    step = longest_step(0.06, plain)
    assert (step == math.inf) == (gap_miss_probability(plain, 0.06) == 1.0), (
        "a gap that is missed in any case does not count"
    )
    assert step == math.inf or gap_miss_probability(step, 0.06) == 0.0


def test_an_engine_that_computes_prompts_whole_has_no_chunk() -> None:
    assert chunk_of(0.04, 0.01, 0.0001, 0, BLOCK) == 0


def test_the_chunk_fills_the_step() -> None:
    assert chunk_of(0.042, 0.010, 1e-4, USUAL, BLOCK) == 320
    assert chunk_of(0.042, 0.010, 1e-5, USUAL, BLOCK) == 3200
    assert chunk_of(0.042, 0.041, 1e-4, USUAL, BLOCK) == BLOCK
    assert chunk_of(math.inf, 0.010, 1e-4, USUAL, BLOCK) == USUAL, "no gap to keep"
    assert chunk_of(0.042, 0.010, 0.0, USUAL, BLOCK) == USUAL, "nothing measured"


@pytest.mark.parametrize("slow", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_streams_keep_their_gap_and_a_prompt_beside_them_is_computed_fast(slow: float) -> None:
    """The engines are from 10 times faster to 10 times slower, and begin with the same chunk."""
    gap, begin = 0.06, 5 * slow
    graph = VirtualGraph(
        DecodeSection(remote_prefill=False), promised=Promised(math.inf, gap), slow=(slow, 1)
    )
    graph.ask(20, tokens=8000)
    graph.after(begin / 2, lambda: graph.ask(3000))  # teaches the speeds
    for _ in range(4):
        graph.after(begin, lambda: graph.ask(20, tokens=8000))
    graph.after(1.1 * begin, lambda: graph.ask(6000, tokens=8000))
    graph.run(2.2 * begin)
    _, *streams, long = graph.decode[0].live
    assert len(streams) == 4
    for stream in streams:
        assert stream.longest_gap <= gap
    plain, more = (slow * SPEED.step_time(5, 0, [(0, tokens)] * bool(tokens)) for tokens in (0, 6000))
    room = 1 - plain / (0.7 * gap)
    assert long.ttft < 1.5 * (more - plain) / room


@pytest.mark.parametrize(
    ("plain", "token", "tokens"),
    [
        pytest.param(0.010, 1e-5, USUAL, id="a fast engine computes what is usual"),
        pytest.param(0.010, 1e-4, 180, id="a slower engine computes what fits"),
        pytest.param(0.010, 1e-3, USUAL // 4, id="a very slow engine computes a quarter of the usual"),
        pytest.param(0.040, 2e-4, 200, id="steps without prompts are long too"),
        pytest.param(0.010, 0.0, USUAL, id="nothing measured"),
    ],
)
def test_without_a_promise_streams_of_a_slow_engine_wait_less_for_chunks(
    plain: float, token: float, tokens: int
) -> None:
    assert abs(chunk_without_slo(plain, token, USUAL, BLOCK) - tokens) <= 1
    assert chunk_without_slo(plain, token, 0, BLOCK) == 0, "prompts are computed whole"


class Limited(SimEngine):
    chunks: list[int]

    async def limit_chunk(self, tokens: int) -> None:
        self.chunks = [*getattr(self, "chunks", []), tokens]
        await super().limit_chunk(tokens)


async def test_the_chunk_follows_the_running_requests() -> None:
    arguments = {"long-prefill-token-threshold": USUAL}
    async with WorkerGraph(engine=Limited, remote_prefill=False, engine_args=arguments) as graph:
        engine = graph.decode_engine
        assert isinstance(engine, Limited)
        async with FrontendStream(graph.stream.address) as frontend:
            stream = await frontend.submit(SHORT, 5000, promise=Promise(gap=0.05))
            for number in range(4):
                await frontend.ask([*LONG[number:], *LONG])
            assert engine.chunks[0] > USUAL, "a thousand tokens take a millisecond"
            await frontend.cancel(stream)
            await frontend.ask(LONG)
            assert engine.chunks[-1] == USUAL
