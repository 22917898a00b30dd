"""Everything that the engine side uses of vLLM, in one place; the connector, which runs inside vLLM's own
worker process, is the other (`pdserve/kv/connector.py`).

Importing this takes seconds: import it late. `tests/engine/test_vllm_api.py` compares what is used here
with the installed vLLM, and says what moved after an upgrade."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm import __version__ as VERSION
from vllm.config import VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

__all__ = [
    "VERSION",
    "AllBlocksCleared",
    "AsyncMPClient",
    "BlockRemoved",
    "BlockStored",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "FinishReason",
    "KVEventBatch",
    "MsgpackDecoder",
    "PrefillStats",
    "PrometheusStatLogger",
    "SamplingParams",
    "SchedulerStats",
    "VllmConfig",
    "chain_hashes",
    "decode_request",
    "encode_outputs",
    "encode_request",
    "engine_config",
    "on_cpu",
    "seed_hashes",
    "start_core",
]


def engine_config(argv: Sequence[str]) -> VllmConfig:
    """vLLM's configuration from its own command-line arguments; looks at the model's folder and the
    hardware."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(argv))).create_engine_config()


def on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def start_core(config: VllmConfig) -> AsyncMPClient:
    """Start the engine's processes and wait until the model is loaded: blocks for a minute. To be called in
    a thread without an event loop; the client is then used from the loop that first awaits it."""
    return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), True)


_request_decoder = MsgpackDecoder(EngineCoreRequest)
_encoder = MsgpackEncoder()


def decode_request(body: list[bytes]) -> EngineCoreRequest:
    """Raises what msgspec raises for a body that is none."""
    request: EngineCoreRequest = _request_decoder.decode(body)
    return request


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(frame) for frame in _encoder.encode(request)]


def encode_outputs(outputs: list[EngineCoreOutput], timestamp: float) -> list[bytes]:
    """Without scheduler statistics: those of a KV connector crash a frontend that has none."""
    step = EngineCoreOutputs(outputs=outputs, scheduler_stats=None, timestamp=timestamp)
    return [bytes(frame) for frame in _encoder.encode(step)]


def chain_hashes(config: VllmConfig, request: EngineCoreRequest) -> Iterator[Any]:
    """The hashes of the prompt's full blocks, as the KV events name them, computed one by one as they are
    asked for: hashing is the dear part. LoRA, salt and images are in them. The engine's processes must have
    been started from this one, or the seeds differ."""
    hash_function, size = (
        get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo),
        config.cache_config.block_size,
    )
    whole = Request.from_engine_core_request(request, None)
    parent, image = None, 0
    for start in range(0, len(request.prompt_token_ids) // size * size, size):
        end = start + size
        extra, image = generate_block_hash_extra_keys(whole, start, end, image)
        parent = hash_block_tokens(hash_function, parent, request.prompt_token_ids[start:end], extra)
        yield maybe_convert_block_hash(parent)


def seed_hashes(config: VllmConfig) -> None:
    """Once, before the first `chain_hashes`."""
    init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
