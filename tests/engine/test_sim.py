"""The simulated engine keeps the contract, and fails where vLLM would."""

import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import block_names, root_name
from pdserve.contract.records import Role
from pdserve.engine.base import Transfers
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.wire import CoreRequest, Sampling
from pdserve.util.errors import ProtocolError
from tests.conditions import until
from tests.engine.sims import body, collect, sim, tokens

PROMPT = list(range(3, 203))
PATIENT = {"transfer-timeout": 30.0}
"""so that no transfer fails because this machine is busy"""


@pytest.fixture
async def prefill() -> AsyncIterator[SimEngine]:
    async with sim(Role.PREFILL, "p") as engine:
        yield engine


@pytest.fixture
async def decode() -> AsyncIterator[SimEngine]:
    async with sim(Role.DECODE, "d", **PATIENT) as engine:
        yield engine


async def computed_alone(prompt: list[int], count: int) -> list[int]:
    """The tokens of an engine that gets no other prompt."""
    async with sim(Role.DECODE, "alone") as engine:
        await engine.generate("r", prompt, body(count), None)
        return tokens(await collect(engine, "r"))


async def prefilled(engine: SimEngine, request_id: str, prompt: list[int]) -> KvHandle:
    await engine.prefill(request_id, prompt, body())
    handle = (await collect(engine, request_id))[-1].handle
    assert handle is not None
    return handle


async def transfers(engine: SimEngine) -> Transfers:
    while (found := (await engine.step()).transfers) is None:
        pass
    return found


async def released(engine: SimEngine) -> list[str]:
    while not (found := (await engine.step()).released):
        pass
    return found


def test_a_simulated_engine_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, pdserve.engine.sim.engine; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


async def test_pulled_kv_gives_the_tokens_of_local_kv(prefill: SimEngine, decode: SimEngine) -> None:
    await decode.generate("r", PROMPT, body(5), await prefilled(prefill, "r", PROMPT))
    pulled = await transfers(decode)
    assert pulled.bytes > 0
    assert pulled.failures == 0
    assert tokens(await collect(decode, "r")) == await computed_alone(PROMPT, 5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 3000])
@pytest.mark.parametrize("cached", [0, 16])
async def test_the_first_token_comes_from_prefill(
    prefill: SimEngine, decode: SimEngine, length: int, cached: int
) -> None:
    prompt = [3 + i % 900 for i in range(length)]
    await prefill.prefill("p", prompt, body())
    (done,) = await collect(prefill, "p")
    if cached:
        await decode.generate("cached", [*prompt[:cached], 1], body(1), None)
        await collect(decode, "cached")
    first = decode.first_output("r", prompt, body(5), prefill.pack([done]))
    assert first is not None
    assert (first.request_id, first.finished) == ("r", False)
    await decode.generate("r", prompt, body(5), done.handle, first.tokens)
    handed = await collect(decode, "r")
    assert [output.recomputed for output in handed] == [False] * 4
    assert first.tokens + tokens(handed) == await computed_alone(prompt, 5)
    await until(prefill.all_blocks_free)
    await until(decode.all_blocks_free)
    last = decode.first_output("r2", prompt, body(1), prefill.pack([done]))
    assert last is not None
    assert last.finished


async def test_a_first_token_may_be_the_last_that_fits() -> None:
    prompt = [3] * 99
    async with sim(Role.PREFILL, "p", max_model_len=100) as engine:
        await engine.prefill("p", prompt, body())
        (done,) = await collect(engine, "p")
        only = engine.first_output("r", prompt, body(5), engine.pack([done]))
        assert only is not None
        assert only.finished
        assert engine.first_output("r", prompt, body(5), [b"\xff"]) is None


async def test_a_refusal_names_what_is_wrong(decode: SimEngine) -> None:
    with pytest.raises(ProtocolError, match="cannot generate 0 tokens after 20"):
        await decode.generate("none", PROMPT[:20], body(0), None)
    with pytest.raises(ProtocolError, match="a prompt of 9000 tokens"):
        await decode.generate("long", [3] * 9000, body(), None)


async def test_a_cached_prefix_is_neither_computed_nor_pulled_again(
    prefill: SimEngine, decode: SimEngine
) -> None:
    await decode.generate("a", PROMPT, body(2), None)
    await collect(decode, "a")
    assert decode.prefix_hit(PROMPT, body()) == 192
    assert decode.prefix_hit([*PROMPT[:100], 1, *PROMPT[100:]], body()) == 96
    assert decode.prefix_hit([1, *PROMPT], body()) == 0
    await decode.generate("b", PROMPT, body(2), await prefilled(prefill, "b", PROMPT))
    assert (await transfers(decode)).bytes == 16 * 4096


async def test_answers_are_cached_and_salts_separate_prefixes(decode: SimEngine) -> None:
    salted = [msgspec.msgpack.encode(CoreRequest("", None, None, Sampling(40), cache_salt="salt"))]
    await decode.generate("a", PROMPT, salted, None)
    answer = tokens(await collect(decode, "a"))
    assert decode.prefix_hit([*PROMPT, *answer], salted) == 224
    assert decode.prefix_hit([*PROMPT, *answer], body()) == 0
    assert sorted(decode.prefixes.known()) == sorted(
        block_names([*PROMPT, *answer[:-1]], 16, root_name("salt"))
    )
    assert await decode.all_blocks_free()
    assert decode.prefixes.known() == []


@pytest.mark.usefixtures("brief_transfers")
@pytest.mark.parametrize("change", [{}, {"engine_id": "an earlier boot"}, {"port": 1}])
async def test_kv_that_cannot_be_read_is_recomputed(prefill: SimEngine, change: dict[str, object]) -> None:
    """The prefill engine is silent, has restarted, or has closed its port."""
    handle = msgspec.structs.replace(await prefilled(prefill, "r", PROMPT), **change)
    prefill.faults.drop_transfers = not change
    async with sim(Role.DECODE, "d") as decode:
        await decode.generate("r", PROMPT, body(5), handle)
        step = await decode.step()
        assert step.transfers == Transfers(failures=1)
        assert list(step.unread) == ["r"]
        assert tokens(await collect(decode, "r")) == await computed_alone(PROMPT, 5)


@pytest.mark.parametrize("pause", ["before the read", "during the read"])
async def test_kv_that_its_engine_gave_to_another_prompt_is_not_used(pause: str) -> None:
    """The KV lease ends before or during the read, and the reader does not notice."""
    async with (
        sim(Role.PREFILL, "p", lease=0.2, num_gpu_blocks_override=16) as prefill,
        sim(Role.DECODE, "d", **PATIENT, **{"transfer-seconds": 0.5}) as decode,
    ):
        handle = await prefilled(prefill, "r", PROMPT)

        async def given_away() -> None:
            await until(prefill.all_blocks_free)
            await prefilled(prefill, "other", PROMPT[::-1])

        if pause == "before the read":
            await given_away()
        await decode.generate("r", PROMPT, body(5), handle)
        if pause == "during the read":
            await given_away()
        assert "no longer held" in (await decode.step()).unread["r"]
        assert tokens(await collect(decode, "r")) == await computed_alone(PROMPT, 5)


async def test_released_kv_is_freed_and_reported_once(decode: SimEngine) -> None:
    async with sim(Role.PREFILL, "p", lease=0.2) as prefill:
        read = msgspec.structs.replace(await prefilled(prefill, "read", PROMPT), lease=30.0)
        assert not await prefill.all_blocks_free()
        await decode.generate("read", PROMPT, body(1), read)
        assert await released(prefill) == ["read"]
        await decode.reject(await prefilled(prefill, "rejected", PROMPT))
        assert await released(prefill) == ["rejected"]
        await prefilled(prefill, "expired", PROMPT)
        assert await released(prefill) == ["expired"]
        assert await prefill.all_blocks_free()
        await decode.reject(read)
        await prefilled(prefill, "next", PROMPT)
        assert await released(prefill) == ["next"]


async def test_requests_wait_for_free_blocks() -> None:
    async with sim(Role.DECODE, "d", num_gpu_blocks_override=16) as decode:
        for number in range(4):
            await decode.generate(f"r{number}", PROMPT, body(3), None)
        done: set[str] = set()
        while len(done) < 4:
            done |= {output.request_id for output in (await decode.step()).outputs if output.finished}
        await until(decode.all_blocks_free)
