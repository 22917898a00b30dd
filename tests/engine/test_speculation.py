"""Two real engines with speculative decoding in the decode engine or in both: the tokens are those of an engine without
speculation, wherever the prompt was computed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdserve.contract.records import Role
from tests.engine.test_vllm_engine import MODEL, Engines, body, prompt_of, sampled, tokens_of, two_engines

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

TOKENS = 60
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
DRAFT = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "n-gram": ({"speculative-config": NGRAM}, {}),
    "draft model": ({"speculative-config": DRAFT}, {"speculative-config": DRAFT}),
}
"""arguments of the decode engine and of the prefill engine"""
EXPECTED: dict[int, list[int]] = {}
"""length of a prompt -> its tokens, from an engine without speculation"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engines]:
    folder, roles = tmp_path_factory.mktemp("engines"), (Role.BOTH, Role.BOTH)
    async with two_engines(folder / "log", *KINDS[request.param], roles) as pair:
        yield pair


def repeating(length: int) -> list[int]:
    """A prompt in which n-grams are found."""
    return (prompt_of(min(length, 40), seed=length) * length)[:length]


@pytest.mark.parametrize("length", [1, 32, 33, 500, 3000])
async def test_the_tokens_are_those_of_an_engine_without_speculation(pair: Engines, length: int) -> None:
    prompt = repeating(length)
    if length not in EXPECTED:  # in the n-gram pair, which is first, the prefill engine does not speculate
        await pair.prefill.engine.generate(f"plain-{length}", prompt, body(TOKENS), None)
        EXPECTED[length] = await pair.prefill.end(f"plain-{length}")
        assert len(pair.prefill.outputs[f"plain-{length}"]) == TOKENS, "a token in each step"
    local = await pair.decode.answer(f"local-{length}", prompt, body(TOKENS))
    await pair.all_free()
    remote = await pair.hand_over(f"remote-{length}", prompt, body(TOKENS))
    assert tokens_of(local) == EXPECTED[length]
    assert tokens_of(remote) == EXPECTED[length]
    assert max(len(local), len(remote)) < TOKENS, "several tokens in a step"
    assert len(pair.prefill.outputs[f"p-remote-{length}"][0].tokens) == 1, (
        "the first token, sampled by the prefill engine"
    )
    assert not any(output.recomputed for output in remote)
    await pair.all_free()


async def test_requests_in_a_batch_have_their_own_drafts(pair: Engines) -> None:
    """The same steps have greedy requests and requests with top_k 1 and other temperatures. Each engine prefills for
    the other, as under `role: both`."""
    kinds = (
        body(TOKENS),
        *(sampled(TOKENS, temperature=heat, top_k=1, ignore_eos=True) for heat in (1.0, 0.3)),
    )
    for way in (pair, Engines(pair.prefill, pair.decode)):
        asked = [(length, way.hand_over(f"{length} {number}", repeating(length), kind))
                 for length in (33, 500) for number, kind in enumerate(kinds)]  # fmt: skip
        found = await asyncio.gather(*(handed for _, handed in asked))
        for (length, _), outputs in zip(asked, found, strict=True):
            assert tokens_of(outputs) == EXPECTED[length]
            assert not any(output.recomputed for output in outputs)
        await pair.all_free()


async def test_a_request_continues_after_any_token(pair: Engines) -> None:
    """A migration may continue after any token, also between tokens that one step accepted."""
    prompt, tokens = repeating(500), EXPECTED[500]
    for done in (1, 2, 17, 18, 19, 20, TOKENS - 1):
        name = f"after-{done}"
        await pair.decode.engine.generate(name, prompt + tokens[:done], body(TOKENS - done), None)
        assert await pair.decode.end(name) == tokens[done:]
    await pair.all_free()


async def test_requests_that_sample_get_tokens(pair: Engines) -> None:
    """vLLM judges drafts of sampling requests by their probability. The first draft after a KV transfer is a
    placeholder and has none."""
    one = sampled(TOKENS, temperature=1.0, top_k=1, ignore_eos=True)
    for number in range(3):
        assert tokens_of(await pair.hand_over(f"one-{number}", repeating(500), one)) == EXPECTED[500]
    drawn = sampled(TOKENS, temperature=1.0, seed=7, ignore_eos=True)
    for number in range(3):
        tokens = tokens_of(await pair.hand_over(f"drawn-{number}", repeating(500), drawn))
        assert len(tokens) == TOKENS
        assert min(tokens) >= 0
    await pair.all_free()
