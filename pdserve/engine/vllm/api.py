"""Everything that our own processes use of vLLM's engine. Code that runs in vLLM's processes imports vLLM itself
(`worker.py`, `pdserve/kv/connector.py`). `tests/engine/test_vllm_api.py` compares what is used with the installed vLLM.

Importing this module takes seconds: import it late."""

import os
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess as BaseProcess
from threading import Thread
from uuid import uuid4

from vllm import __version__
from vllm.config import VllmConfig as VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU as MEDIUM_CPU
from vllm.distributed.kv_events import AllBlocksCleared as AllBlocksCleared
from vllm.distributed.kv_events import BlockRemoved as BlockRemoved
from vllm.distributed.kv_events import BlockStored as BlockStored
from vllm.distributed.kv_events import KVEventBatch as KVEventBatch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_zmq_ipc_path as get_open_zmq_ipc_path
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.engine import EngineCoreEventType as EngineCoreEventType
from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
from vllm.v1.engine import FinishReason as FinishReason
from vllm.v1.engine.core_client import AsyncMPClient as AsyncMPClient
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.executor import Executor, multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor as MultiprocExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger as PrometheusStatLogger
from vllm.v1.metrics.stats import PrefillStats as PrefillStats
from vllm.v1.metrics.stats import SchedulerStats as SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder as MsgpackDecoder
from vllm.v1.serial_utils import MsgpackEncoder

VERSION: str = __version__
BY_SIGNAL = 128
"""A core whose rank was ended by a signal exits with this plus the signal's number."""
_monitor = MultiprocExecutor.start_worker_monitor


def engine_config(argv: Sequence[str], headless: bool = False) -> VllmConfig:
    """vLLM's configuration from its command-line arguments. Reads the model's folder and inspects the hardware.
    `headless`: for a host that does not have the engine's core."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(argv))).create_engine_config(
        headless=headless
    )


def on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def compute_in_core(config: VllmConfig) -> None:
    """Run the model of a CPU engine with one rank in the core process, as vLLM does on GPUs. Otherwise each step goes
    to a second process and back, and both spin while they wait (decision 0024). Change nothing if vLLM is to bind the
    OpenMP threads, for which it needs the second process."""
    parallel = config.parallel_config
    if parallel.world_size == 1 and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        parallel.distributed_executor_backend = "uni"


def move_whole_prompts(config: VllmConfig) -> None:
    """Keep the KV of whole prompts in every layer, so that it can be transferred in blocks. vLLM frees what has left
    the window of layers with a sliding window, unless its hybrid manager is off. Raises ValueError for a model with
    layers that have a state instead of KV, because a state belongs to no block."""
    model = config.model_config
    if model.is_hybrid or model.is_attention_free:
        raise ValueError(
            f"{model.architecture} has layers whose state is not KV in blocks, and cannot be transferred: set "
            "remote-prefill: false, and leave out PrefillWorker."
        )
    if model.get_sliding_window() is not None:
        config.scheduler_config.disable_hybrid_kv_cache_manager = True


def keep_images() -> None:
    """Have engines that are forked from this process give their ranks all images of a request. vLLM leaves out images
    whose KV is cached, and dies when it computes the request again after a preemption."""
    scheduler_output.strip_covered_mm_data = lambda features, *_, **__: features


def meet_in(path: str) -> None:
    """Have the ranks of engines that are forked from this process meet through a file whose path begins with `path`, so
    that the caller can remove the file of a killed engine."""

    def init_method() -> str:
        return f"file://{path}{uuid4().hex}"

    for executor in (uniproc_executor, multiproc_executor):
        executor.get_file_store_init_method = init_method


def end_with_ranks() -> None:
    """Have the core of an engine that is forked from this process kill its ranks and end as soon as one rank ends. The
    core's exit status then says how that rank ended (`BY_SIGNAL`). vLLM would wait 9 s for the other ranks, which
    cannot finish."""
    this_process = os.getpid()

    def start_worker_monitor(self: MultiprocExecutor, inline: bool = False) -> None:
        if os.getpid() == this_process:  # this host has only ranks, and the core is on another
            _monitor(self, inline)
        else:
            Thread(target=_end_with_first_rank, args=(self,), daemon=True).start()

    MultiprocExecutor.start_worker_monitor = start_worker_monitor


def _end_with_first_rank(executor: MultiprocExecutor) -> None:
    ranks = {each.proc.sentinel: each.proc for each in executor.workers}
    first = ranks[wait(ranks)[0]]
    if not getattr(executor, "shutting_down", False):
        first.join()  # its sentinel closes before its exit status is known
        for rank in ranks.values():
            rank.kill()
        os._exit(first.exitcode if first.exitcode >= 0 else BY_SIGNAL - first.exitcode)


def start_core(config: VllmConfig) -> AsyncMPClient:
    """Start the engine's processes and wait until the model is loaded, about a minute. Call it in a thread without an
    event loop; the client then belongs to the loop that first awaits it."""
    return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), True)


def start_ranks(config: VllmConfig) -> MultiprocExecutor:
    """Start this host's ranks of an engine whose core is on another host, as `vllm serve --headless` does. Return when
    all ranks of the engine have loaded the model. vLLM ends this host's ranks when one of them dies (`is_failed`)."""
    return MultiprocExecutor(config)


_request_decoder = MsgpackDecoder(EngineCoreRequest)
_output_decoder = MsgpackDecoder(EngineCoreOutputs)
_encoder = MsgpackEncoder()


def decode_request(body: list[bytes]) -> EngineCoreRequest:
    """Raises errors of msgspec if the body is no request."""
    request: EngineCoreRequest = _request_decoder.decode(body)
    return request


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(frame) for frame in _encoder.encode(request)]


def encode_outputs(outputs: list[EngineCoreOutput], timestamp: float) -> list[bytes]:
    """Leave out the scheduler's statistics, because those of a KV connector crash a frontend without one."""
    step = EngineCoreOutputs(outputs=outputs, scheduler_stats=None, timestamp=timestamp)
    return [bytes(frame) for frame in _encoder.encode(step)]


def decode_outputs(body: list[bytes]) -> EngineCoreOutputs:
    """Raises many kinds of errors if the body has no outputs."""
    outputs: EngineCoreOutputs = _output_decoder.decode(body)
    return outputs
