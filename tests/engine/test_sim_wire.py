"""The simulation's own structs against vLLM's: what one writes the other reads, field by field."""

import msgspec
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
    assert [(output.request_id, output.new_token_ids, output.finish_reason) for output in theirs.outputs] == [
        ("a", [1, 2], None),
        ("b", [3], FinishReason.LENGTH),
        ("c", [], FinishReason.ERROR),
    ]
    assert theirs.outputs[0].prefill_stats == PrefillStats(7, 3, 4, 1, 3, 3)
    assert theirs.outputs[1].stop_reason == "end"
    assert theirs.outputs[0] == EngineCoreOutput("a", [1, 2], prefill_stats=PrefillStats(7, 3, 4, 1, 3, 3))


def test_our_fields_are_a_prefix_of_vllms() -> None:
    for ours, theirs in (
        (wire.CoreOutput, EngineCoreOutput),
        (wire.CoreOutputs, EngineCoreOutputs),
        (wire.CoreRequest, EngineCoreRequest),
    ):
        names = [field.name for field in msgspec.structs.fields(theirs)]
        assert [field.name for field in msgspec.structs.fields(ours)] == names[: len(ours.__struct_fields__)]
    numbers = (wire.STOP, wire.LENGTH, wire.ABORT, wire.ERROR)
    assert numbers == (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


def test_our_reader_takes_vllms_request() -> None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=33, temperature=0.0, prompt_logprobs=2, stop=["x"]),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
    )
    read = wire.read_request([bytes(frame) for frame in MsgpackEncoder().encode(request)])
    assert read.sampling_params == wire.Sampling(max_tokens=33, prompt_logprobs=2)
    assert read.mm_features is None


def test_defaults_mean_the_same_on_both_sides() -> None:
    body = MsgpackEncoder().encode(
        EngineCoreRequest("r", None, None, SamplingParams(), None, 1.0, None, None, None)
    )
    sampling = wire.read_request([bytes(frame) for frame in body]).sampling_params
    assert sampling == wire.Sampling(max_tokens=SamplingParams().max_tokens)
