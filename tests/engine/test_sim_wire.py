"""The simulation's own structs against vLLM's: each reads what the other writes, field by field."""

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdserve.engine.sim import wire


def test_vllm_decodes_every_field_of_our_outputs() -> None:
    stats = wire.PrefillStats(7, 3, 4, 1, 3, 3)
    ours = [
        wire.CoreOutput("a", [1, 2], prefill_stats=stats),
        wire.CoreOutput("b", [3], finish_reason=wire.LENGTH, stop_reason="end"),
        wire.CoreOutput("c", [], finish_reason=wire.ERROR),
    ]
    theirs = MsgpackDecoder(EngineCoreOutputs).decode(wire.write_outputs(ours))
    assert theirs.timestamp > 0
    assert theirs.scheduler_stats is None
    assert theirs.outputs == [
        EngineCoreOutput("a", [1, 2], prefill_stats=PrefillStats(7, 3, 4, 1, 3, 3)),
        EngineCoreOutput("b", [3], finish_reason=FinishReason.LENGTH, stop_reason="end"),
        EngineCoreOutput("c", [], finish_reason=FinishReason.ERROR),
    ]


def test_our_fields_are_a_prefix_of_vllms() -> None:
    for ours, theirs in (
        (wire.CoreOutput, EngineCoreOutput),
        (wire.CoreOutputs, EngineCoreOutputs),
        (wire.CoreRequest, EngineCoreRequest),
    ):
        names = [field.name for field in msgspec.structs.fields(theirs)]
        assert [field.name for field in msgspec.structs.fields(ours)] == names[: len(ours.__struct_fields__)]
    assert (wire.LENGTH, wire.ERROR) == (FinishReason.LENGTH, FinishReason.ERROR)


@pytest.mark.parametrize(
    ("params", "read"),
    [
        ({}, wire.Sampling(max_tokens=16)),
        (
            {"max_tokens": 33, "temperature": 0.0, "prompt_logprobs": 2, "stop": ["x"]},
            wire.Sampling(max_tokens=33, prompt_logprobs=2),
        ),
    ],
)
def test_our_reader_takes_vllms_request(params: dict[str, Any], read: wire.Sampling) -> None:
    request = EngineCoreRequest("r", None, None, SamplingParams(**params), None, 1.0, None, "salt", None)
    found = wire.read_request([bytes(frame) for frame in MsgpackEncoder().encode(request)])
    assert (found.sampling, found.mm_features, found.cache_salt) == (read, None, "salt")
