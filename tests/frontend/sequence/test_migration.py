import time
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from pdserve.contract.sampling import stateful_parameter
from pdserve.frontend.sequence.migration import encode_body, loss_limit_failure, seeded_for_replay
from pdserve.frontend.workers.link import Link
from tests.frontend.workers.test_router import generation


def request(**params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 20, **params})
    return EngineCoreRequest("r", [1, 2, 3], None, sampling, None, 0.0, None, None, None)


def sent(original: EngineCoreRequest, tokens: list[int]) -> EngineCoreRequest:
    return MsgpackDecoder(EngineCoreRequest).decode(encode_body(original, "r#2", tokens))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, None),
        ({"temperature": 0.0}, None),
        ({"seed": 5, "top_p": 0.9, "top_k": 4, "min_p": 0.1}, None),
        ({"repetition_penalty": 1.2}, None),
        ({"logprobs": 3, "prompt_logprobs": 1, "logit_bias": {5: 1.0}, "min_tokens": 3}, None),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "structured output"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"repetition_detection": RepetitionDetectionParams(4, 1, 3)}, "repetition_detection"),
        ({"trace_decode_token_ids": [1, 2]}, "trace_decode_token_ids"),
    ],
)
def test_parameters_for_which_an_engine_keeps_state_about_the_output(
    params: dict[str, Any], expected: str | None
) -> None:
    assert stateful_parameter(request(**params).sampling_params) == expected


@pytest.mark.parametrize(("words", "expected"), [([[5], [7]], None), ([[5], [7, 8]], "bad_words")])
def test_bad_words_of_several_tokens_are_stateful(words: list[list[int]], expected: str | None) -> None:
    params = SamplingParams()
    params._bad_words_token_ids = words
    assert stateful_parameter(params) == expected


def test_the_first_attempt_changes_only_prompt_id_and_transfer_params() -> None:
    transfers: dict[str, object] = {"kv_transfer_params": {}, "ec_transfer_params": {}}
    original = request(seed=5, min_tokens=4, prompt_logprobs=1, extra_args={"a": 1, **transfers})
    there = sent(original, [])
    params = there.sampling_params
    assert (there.request_id, there.prompt_token_ids, params.extra_args) == ("r#2", None, {"a": 1})
    assert (params.seed, params.min_tokens, params.prompt_logprobs) == (5, 4, 1)
    assert (original.request_id, original.prompt_token_ids) == ("r", [1, 2, 3])
    assert "kv_transfer_params" in original.sampling_params.extra_args
    assert sent(request(extra_args=transfers), []).sampling_params.extra_args is None


def test_a_later_attempt_subtracts_the_tokens_so_far() -> None:
    params = sent(request(seed=5, min_tokens=4, prompt_logprobs=1, logprobs=2), [9, 9, 9]).sampling_params
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (17, 1, 2)
    assert params.prompt_logprobs is None
    assert sent(request(min_tokens=2), [9, 9, 9]).sampling_params.min_tokens == 0


def test_seeds_differ_by_position_and_are_repeatable() -> None:
    seeds = [sent(request(seed=5), [9] * count).sampling_params.seed for count in (0, 1, 2, 2)]
    assert (len(set(seeds)), seeds[0], seeds[2]) == (3, 5, seeds[3])


def test_sampling_that_may_be_replayed_gets_a_seed() -> None:
    original = request(presence_penalty=0.5, temperature=0.7)
    seeds = {seeded_for_replay(original).sampling_params.seed for _ in range(3)}
    assert len(seeds - {None}) == 3
    assert original.sampling_params.seed is None
    for params in ({}, {"presence_penalty": 0.5, "temperature": 0.0}, {"presence_penalty": 0.5, "seed": 4}):
        assert seeded_for_replay(same := request(**params)) is same


@pytest.mark.parametrize(
    ("losses", "engines_died", "status"),
    [(3, 0, None), (3, 1, None), (4, 0, 503), (0, 2, 500), (4, 2, 500)],
)
def test_how_often_a_request_is_tried(losses: int, engines_died: int, status: int | None) -> None:
    lost = generation([1], losses=losses, engines_died=engines_died)
    lost.last_loss = "it is gone"
    failure = loss_limit_failure(lost)
    assert (failure.status if failure else None) == status
    if failure is not None:
        assert "it is gone" in failure.message
        assert bool(failure.retry_after) == (status == 503)


def test_the_wait_for_a_worker_is_not_part_of_the_learnt_ttft() -> None:
    waited = generation([1])
    time.sleep(0.01)
    sent = time.monotonic()
    waited.attach(Link("decode-0", lambda _: None), "r#1")
    waited.add_tokens([5])
    assert waited.timing[1] <= time.monotonic() - sent
