"""The simulated engine keeps the contract, and goes wrong where vLLM would."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from pdserve.engine.base import Transfers
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.wire import CoreRequest, Sampling
from pdserve.errors import EngineDead, ProtocolError
from pdserve.messages import KvHandle
from pdserve.prefixes import names, root
from pdserve.records import Role
from tests.conditions import until
from tests.engine.sims import body, collect, sim, tokens

PROMPT = list(range(3, 203))


async def prefilled(engine: SimEngine, request_id: str, prompt: list[int]) -> KvHandle:
    await engine.prefill(request_id, prompt, body())
    handle = (await collect(engine, request_id))[-1].handle
    assert handle is not None
    return handle


async def transfers(engine: SimEngine) -> Transfers:
    while (found := (await engine.step()).transfers) is None:
        pass
    return found


async def freed(engine: SimEngine) -> None:
    await until(engine.all_blocks_free)


def test_it_starts_without_vllm_and_torch() -> None:
    code = "import sys, pdserve.engine.sim.engine; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


async def test_a_request_continued_elsewhere_gets_the_same_tokens() -> None:
    async with sim(Role.DECODE, "a") as first, sim(Role.DECODE, "b") as second:
        await first.generate("r", PROMPT, body(10), None)
        whole = tokens(await collect(first, "r"))
        await second.generate("r2", PROMPT + whole[:4], body(6), None)
        assert tokens(await collect(second, "r2")) == whole[4:]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 500, 3000])
async def test_pulled_kv_gives_the_tokens_of_local_kv(length: int) -> None:
    prompt = [3 + i % 900 for i in range(length)]
    async with (
        sim(Role.PREFILL, "p") as prefill,
        sim(Role.DECODE, "d") as decode,
        sim(Role.DECODE, "l") as local,
    ):
        handle = await prefilled(prefill, "r", prompt)
        await decode.generate("r", prompt, body(5), handle)
        pulled = await transfers(decode)
        assert pulled.bytes > 0
        assert pulled.failures == 0
        await local.generate("r", prompt, body(5), None)
        assert tokens(await collect(decode, "r")) == tokens(await collect(local, "r"))
        await freed(prefill)
        await freed(decode)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 500])
@pytest.mark.parametrize("cached", [0, 16])
async def test_the_first_token_comes_from_prefill(length: int, cached: int) -> None:
    prompt = [3 + i % 900 for i in range(length)]
    async with (
        sim(Role.PREFILL, "p") as prefill,
        sim(Role.DECODE, "d") as decode,
        sim(Role.DECODE, "l") as local,
    ):
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
        await local.generate("r", prompt, body(5), None)
        assert first.tokens + tokens(handed) == tokens(await collect(local, "r"))
        await freed(prefill)
        await freed(decode)
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


async def test_a_cached_prefix_is_neither_computed_nor_pulled_again() -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d") as decode:
        await decode.generate("a", PROMPT, body(2), None)
        await collect(decode, "a")
        assert decode.prefix_hit(PROMPT, body()) == 192
        assert decode.prefix_hit([*PROMPT[:100], 1, *PROMPT[100:]], body()) == 96
        assert decode.prefix_hit([1, *PROMPT], body()) == 0
        await decode.generate("b", PROMPT, body(2), await prefilled(prefill, "b", PROMPT))
        assert (await transfers(decode)).bytes == 16 * 4096


async def test_answers_are_cached_and_salts_separate_prefixes() -> None:
    async with sim(Role.DECODE, "d") as decode:
        salted = [msgspec.msgpack.encode(CoreRequest("", None, None, Sampling(40), cache_salt="salt"))]
        await decode.generate("a", PROMPT, salted, None)
        answer = tokens(await collect(decode, "a"))
        assert decode.prefix_hit([*PROMPT, *answer], salted) == 224
        assert decode.prefix_hit([*PROMPT, *answer], body()) == 0
        assert sorted(decode.prefixes.told()) == sorted(names([*PROMPT, *answer[:-1]], 16, root("salt")))
        assert await decode.all_blocks_free()
        assert decode.prefixes.told() == []


async def test_a_dead_prefill_engine_means_recomputing() -> None:
    async with sim(Role.DECODE, "d") as decode, sim(Role.DECODE, "l") as local:
        async with sim(Role.PREFILL, "p") as prefill:
            handle = await prefilled(prefill, "r", PROMPT)
        await decode.generate("r", PROMPT, body(5), handle)
        assert (await transfers(decode)).failures == 1
        await local.generate("r", PROMPT, body(5), None)
        assert tokens(await collect(decode, "r")) == tokens(await collect(local, "r"))


async def test_a_silent_prefill_engine_means_recomputing() -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d") as decode:
        handle = await prefilled(prefill, "r", PROMPT)
        prefill.faults.drop_transfers = True
        await decode.generate("r", PROMPT, body(2), handle)
        assert (await transfers(decode)).failures == 1
        assert len(tokens(await collect(decode, "r"))) == 2


async def test_blocks_of_another_boot_are_not_read() -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d") as decode:
        handle = msgspec.structs.replace(await prefilled(prefill, "r", PROMPT), engine_id="an earlier boot")
        await decode.generate("r", PROMPT, body(1), handle)
        step = await decode.step()
        assert step.transfers == Transfers(failures=1)
        assert list(step.unread) == ["r"]


async def test_released_kv_is_freed() -> None:
    async with sim(Role.PREFILL, "p") as prefill:
        handle = await prefilled(prefill, "r", PROMPT)
        assert not await prefill.all_blocks_free()
        await prefill.release(handle)
        assert (await prefill.step()).released == [handle.request_id]
        assert await prefill.all_blocks_free()


async def test_blocks_read_after_their_lease_give_wrong_tokens() -> None:
    """What the lease check guards against; the handle here has a wrong lease."""
    async with (
        sim(Role.PREFILL, "p", lease=0.01, num_gpu_blocks_override=16) as prefill,
        sim(Role.DECODE, "d") as decode,
        sim(Role.DECODE, "l") as local,
    ):
        handle = msgspec.structs.replace(await prefilled(prefill, "r", PROMPT), lease=30.0)
        await freed(prefill)
        await prefilled(prefill, "other", PROMPT[::-1])
        await decode.generate("r", PROMPT, body(5), handle)
        await local.generate("r", PROMPT, body(5), None)
        assert tokens(await collect(decode, "r")) != tokens(await collect(local, "r"))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"block_ids": [[1, 2]]},
        {"block_ids": []},
        {"num_tokens": 12},
        {"computed_at": 1.0},
        {"host": ""},
    ],
)
async def test_a_handle_that_does_not_fit_is_refused_and_starts_nothing(change: dict[str, object]) -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d") as decode:
        handle = msgspec.structs.replace(await prefilled(prefill, "r", PROMPT), **change)
        with pytest.raises(ProtocolError):
            await decode.generate("r", PROMPT, body(), handle)
        assert decode.usage.waiting == 0
        await decode.generate("r", PROMPT, body(), None)


async def test_a_request_id_is_used_once() -> None:
    async with sim(Role.DECODE, "d") as decode:
        await decode.generate("r", PROMPT, body(), None)
        with pytest.raises(ProtocolError):
            await decode.generate("r", PROMPT, body(), None)
        assert len(tokens(await collect(decode, "r"))) == 4


async def test_cancel_frees_blocks_at_every_phase() -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d", max_num_seqs=1) as decode:
        handle = await prefilled(prefill, "pulling", PROMPT)
        prefill.faults.drop_transfers = True
        await decode.generate("pulling", PROMPT, body(), handle)
        await decode.generate("waiting", PROMPT, body(), None)
        await until(lambda: decode.usage.waiting == 2 and decode.usage.kv_usage > 0)
        prefill.faults.drop_transfers = False
        await decode.cancel(["pulling", "unknown"])
        assert (await decode.step()).outputs[0].request_id == "waiting"
        await decode.cancel(["waiting"])
        await freed(decode)
        await freed(prefill)


async def test_reject_frees_the_prefill_side() -> None:
    async with sim(Role.PREFILL, "p") as prefill, sim(Role.DECODE, "d") as decode:
        handle = await prefilled(prefill, "r", PROMPT)
        assert not await prefill.all_blocks_free()
        await decode.reject(handle)
        await freed(prefill)


async def test_requests_wait_for_free_blocks() -> None:
    async with sim(Role.DECODE, "d", num_gpu_blocks_override=16) as decode:
        for number in range(4):
            await decode.generate(f"r{number}", PROMPT, body(3), None)
        done: set[str] = set()
        async with asyncio.timeout(5):
            while len(done) < 4:
                done |= {output.request_id for output in (await decode.step()).outputs if output.finished}
        await freed(decode)


async def test_every_method_of_a_dead_engine_raises() -> None:
    async with sim(Role.DECODE, "d") as decode:
        waiting = asyncio.create_task(decode.step())
        await asyncio.sleep(0)
        decode.die()
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await decode.generate("r", PROMPT, body(), None)


async def test_a_hung_engine_goes_on_afterwards() -> None:
    async with sim(Role.DECODE, "d") as decode:
        decode.faults.going.clear()
        await decode.generate("r", PROMPT, body(1), None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decode.step(), 0.05)
        decode.faults.going.set()
        assert len(tokens(await collect(decode, "r"))) == 1


async def test_prompt_logprobs_need_a_local_prefill() -> None:
    async with sim(Role.DECODE, "d") as decode:
        assert decode.prefix_hit(PROMPT, body()) is not None
        assert decode.prefix_hit(PROMPT, body(prompt_logprobs=1)) is None
        with pytest.raises(ProtocolError):
            decode.prefix_hit(PROMPT, [b"\xff"])


async def released(engine: SimEngine) -> list[str]:
    while not (found := (await engine.step()).released):
        pass
    return found


async def test_released_kv_is_named_in_a_step() -> None:
    async with sim(Role.PREFILL, "p", lease=0.5) as prefill, sim(Role.DECODE, "d") as decode:
        handle = msgspec.structs.replace(await prefilled(prefill, "read", PROMPT), lease=30.0)
        await decode.generate("read", PROMPT, body(1), handle)
        assert await released(prefill) == ["read"]
        await decode.reject(await prefilled(prefill, "rejected", PROMPT))
        assert await released(prefill) == ["rejected"]
        await prefilled(prefill, "expired", PROMPT)
        assert await released(prefill) == ["expired"]
        await decode.reject(handle)
        await prefilled(prefill, "next", PROMPT)
        assert await released(prefill) == ["next"], "nothing is released twice"


async def test_kv_of_a_long_prompt_is_pulled() -> None:
    """4,000 blocks: what lies in them takes more than asyncio's 64 KiB for a line."""
    large = {"num_gpu_blocks_override": 5000, "max_model_len": 80_000}
    prompt = [5] * 64_000
    async with sim(Role.PREFILL, "p", **large) as prefill, sim(Role.DECODE, "d", **large) as decode:
        await decode.generate("r", prompt, body(1), await prefilled(prefill, "r", prompt))
        assert (await transfers(decode)).failures == 0
