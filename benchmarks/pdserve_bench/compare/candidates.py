"""What could be run on this hardware instead: pure, from the user's file and the machine to candidates.

Aggregated: one engine with all of the hardware (plain vLLM, the fairest peer, at several `max-num-batched-tokens`), and
as many engines as the file has workers behind pdserve's frontend. Disaggregated: the file's own split, on GPUs two with
unequal tensor-parallel sizes, each other split of the same hardware, and thresholds, which are live settings of one
running graph.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from pdserve.config.schema import Config, PrefillConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.plan.checks import divides
from pdserve.plan.machine import GIB, Machine
from pdserve.plan.memory import CPU_KV_GIB, tensor_size
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import gpus_needed
from pdserve_bench.compare.one_engine import one_engine, thread_counts
from pdserve_bench.sections import Sections, Shape, reshape, with_model
from pdserve_bench.systems.system import GraphSystem, System

BATCHES = {"cpu": (0, 512), "gpu": (512, 2048, 8192), "sim": (128, 512, 2048)}
"""values of max-num-batched-tokens that are tried for aggregated engines: small ones keep the gaps short, large ones
prefill faster; 0: vLLM's own choice"""
START_SECONDS = {"cpu": 40.0, "gpu": 120.0, "sim": 15.0}
W = TypeVar("W", bound=WorkerConfig)


class HardwareKind(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    SIM = "sim"


@dataclass(frozen=True)
class Hardware:
    """What the candidates share. A slot is what one worker of the file takes."""

    kind: HardwareKind
    units: int
    """GPUs, CPU threads, or simulated workers"""
    prefill_width: int = 1
    """units of a prefill worker; on the CPU, slots"""
    decode_width: int = 1
    slots: int = 0
    """that splits divide; on the CPU the workers share the threads, so these are workers"""

    def __str__(self) -> str:
        noun = {"gpu": "GPU", "cpu": "CPU thread", "sim": "simulated worker"}[self.kind]
        return counted(self.units, noun)


@dataclass(frozen=True)
class Launch:
    """What has to be started. Several candidates may be settings of one launch."""

    key: str
    system: System
    memory_gib: float
    """of RAM, about, while it runs; 0 where GPUs are the limit"""


@dataclass(frozen=True)
class Candidate:
    name: str
    aggregated: bool
    shape: Shape
    """the graph of the configuration that would be written; plain vLLM's is one decode worker"""
    launch: Launch
    settings: Mapping[str, str] = field(default_factory=dict)
    """live ones, beside its file"""
    split: str = ""
    """`1P+1D`, or the number of engines"""
    threads: int = 0
    """OMP_NUM_THREADS of an engine that has fewer than the machine has cores; 0: as many"""


ADAPTIVE = {"policy": "adaptive"}


def threshold(tokens: int) -> dict[str, str]:
    """Return the live setting, which also selects the policy `threshold`."""
    return {"max-local-prefill-length": str(tokens)}


def own_settings(config: Config) -> dict[str, str]:
    """What decides in the file's graph, as live settings."""
    assert config.decode is not None
    adaptive = config.decode.policy == "adaptive"
    return ADAPTIVE if adaptive else threshold(config.decode.max_local_prefill_length)


def in_words(settings: Mapping[str, str]) -> str:
    if settings == ADAPTIVE:
        return "each prompt the cheaper way"
    tokens = int(settings["max-local-prefill-length"])
    return f"remote above {counted(tokens, 'token')}" if tokens else "all prompts remote"


def hardware(config: Config, machine: Machine) -> Hardware:
    """Return the hardware of the file's graph. Raises ConfigError where parts of it cannot be compared."""
    decode, prefill = config.decode, config.prefill
    if decode is None:
        raise ConfigError([f"{config.path} has no VllmWorker section: there is nothing to compare with."])
    workers = [worker for worker in (decode, prefill) if worker is not None]
    kinds = {_kind(worker, machine) for worker in workers}
    if len(kinds) > 1:
        raise ConfigError([f"{config.path}: its workers run on different hardware: {', '.join(kinds)}."])
    pinned = [index for worker in workers for index in worker.gpu_ids]
    if len(set(pinned)) < len(pinned):
        raise ConfigError([f"{config.path}: workers share GPUs (gpu-ids): give each its own to compare."])
    kind, count = kinds.pop(), sum(worker.count for worker in workers)
    if kind is HardwareKind.SIM:
        return Hardware(kind, count, slots=count)
    if kind is HardwareKind.CPU:
        return Hardware(kind, machine.cores, slots=max(2, count))
    wide_decode = gpus_needed(decode, machine)
    wide_prefill = gpus_needed(prefill, machine) if prefill else wide_decode
    total = math.ceil(sum(worker.count * worker.share * gpus_needed(worker, machine) for worker in workers))
    if prefill is None and total < wide_decode + wide_prefill and wide_decode % 2 == 0:
        wide_decode = wide_prefill = wide_decode // 2
    return Hardware(kind, total, wide_prefill, wide_decode, total)


def _kind(worker: WorkerConfig, machine: Machine) -> HardwareKind:
    if worker.engine == "sim":
        return HardwareKind.SIM
    return HardwareKind.GPU if gpus_needed(worker, machine) else HardwareKind.CPU


def splits(here: Hardware, slots: int) -> list[tuple[int, int]]:
    """(prefill workers, decode workers) that take exactly so many slots."""
    found = []
    for prefill in range(1, slots // here.prefill_width + 1):
        decode, rest = divmod(slots - prefill * here.prefill_width, here.decode_width)
        if decode and not rest:
            found.append((prefill, decode))
    return found


def unequal(config: Config, machine: Machine, gpus: int) -> list[Shape]:
    """Splits of so many GPUs in which decode workers have twice the ranks of prefill workers, and the other way round,
    each with the fewest ranks that the plan passes (docs/decisions/0076-different-tensor-parallel-sizes.md); none with
    the sizes of the file. As many workers as there is room for, both roles with about as many GPUs."""
    workers = [worker for worker in (config.decode, config.prefill) if worker is not None]
    if any(
        each.ranks != tensor_size(each.engine_args) or each.nodes > 1 or each.share < 1 for each in workers
    ):
        return []
    own, found = tuple(each.ranks for each in reversed(workers)), list[Shape]()
    for ratio in ((1, 2), (2, 1)):
        for size in range(1, gpus // 3 + 1):
            tensor = (size * ratio[0], size * ratio[1])
            whole = splits(Hardware(HardwareKind.GPU, gpus, *tensor), gpus - gpus % size)
            prefill, decode = min(whole, key=lambda split: abs(split[0] * tensor[0] - split[1] * tensor[1]))
            shape = Shape(prefill, decode, tensor=tensor)
            if not make_plan(_of_shape(config, shape), machine).problems:
                found += [shape] if tensor != own else []
                break
    return found


def _of_shape(config: Config, shape: Shape) -> Config:
    """What `reshape` makes of the file, as far as the plan asks."""
    assert config.decode is not None
    like = PrefillConfig(engine_args=config.decode.engine_args, kv_offload=config.decode.kv_offload)
    decode = replace(_resized(config.decode, shape.decode, shape.tensor[1]), remote_prefill=True)
    return replace(
        config, decode=decode, prefill=_resized(config.prefill or like, shape.prefill, shape.tensor[0])
    )


def _resized(worker: W, count: int, tensor: int) -> W:
    args = {**worker.engine_args, "tensor-parallel-size": tensor}
    return replace(worker, count=count, gpus=tensor, gpu_ids=(), engine_args=args)


@dataclass(frozen=True)
class CandidateMaker:
    """Makes the candidates of one file on one machine."""

    config: Config
    base: Sections
    here: Hardware
    machine: Machine
    model: ModelFacts | None = None

    def _single_engines(self, batches: Sequence[int]) -> list[Candidate]:
        """One engine with all of the hardware, the likeliest first: at several batch sizes, on a CPU also with another
        number of threads. Where that cannot be, several engines."""
        first, *others = self._batches(batches)
        if self.here.kind is HardwareKind.CPU:
            threads, *more = thread_counts(self.here.units)
            tried = [
                (first, threads),
                *((first, count) for count in more),
                *((size, threads) for size in others),
            ]
            return [self._one_engine(batch, count) for batch, count in tried]
        if self._has_one_engine:
            return [self._one_engine(batch) for batch in (first, *others)]
        return [self._engines(self._width(), batch) for batch in (first, *others)]

    def aggregated(self, batches: Sequence[int] = ()) -> list[Candidate]:
        """Single engines, and a graph of as many engines as the hardware has room for where those are single ones."""
        found = self._single_engines(batches)
        replicas = self._has_one_engine and self._width() > 1
        return [*found, self._engines(self._width(), found[0].shape.batch)] if replicas else found

    @property
    def _weights_gib(self) -> float:
        return sum(self.model.stored.values()) / GIB if self.model else 0.0

    def disaggregated(self) -> list[Candidate]:
        """Splits of the same hardware: the file's own first, then those with unequal ranks, then those like it."""
        own = self._own_split()
        order = sorted(
            splits(self.here, self.here.slots),
            key=lambda split: (abs(split[0] - own[0]), split[0]) if own else (abs(split[0] - split[1]), 0),
        )
        ways, decode = [threshold(0)], self.config.decode
        decides = own_settings(self.config)
        if decode is not None and decode.conditional_disagg and decides not in ways:
            ways.insert(0, decides)
        found = [self._split(Shape(*split, tensor=self._narrower), ways) for split in order]
        on_gpus = self.here.kind is HardwareKind.GPU
        other = unequal(self.config, self.machine, self.here.units) if on_gpus else []
        found[1:1] = [self._split(shape, ways[:1]) for shape in other]
        return [candidate for split in found for candidate in split]

    @property
    def _narrower(self) -> tuple[int, int]:
        """The sizes of prefill and decode workers that are made of one wider worker; 0: as the file says."""
        halved = self.here.kind is HardwareKind.GPU and self.config.prefill is None
        return (self.here.prefill_width, self.here.decode_width) if halved else (0, 0)

    def _width(self) -> int:
        """Engines of the file's size that the hardware has room for."""
        return max(1, self.here.slots // self.here.decode_width)

    def _own_split(self) -> tuple[int, int] | None:
        if self.config.prefill is None or self.config.decode is None:
            return None
        return self.config.prefill.count, self.config.decode.count

    def _split(self, shape: Shape, ways: Sequence[Mapping[str, str]]) -> list[Candidate]:
        """Its name has the GPUs of a worker where they differ by role."""
        split = f"{shape.prefill}P+{shape.decode}D"
        name = f"{shape.prefill} prefill + {shape.decode} decode"
        wide_prefill, wide_decode = shape.tensor
        if wide_prefill != wide_decode:
            split = f"{shape.prefill}Px{wide_prefill}+{shape.decode}Dx{wide_decode}"
            name = f"{shape.prefill} prefill x {counted(wide_prefill, 'GPU')} + "
            name += f"{shape.decode} decode x {counted(wide_decode, 'GPU')}"
        launch = self._graph(split, name, shape)
        return [
            Candidate(
                name=f"{name}, {in_words(settings)}" if settings else name,
                aggregated=False,
                shape=replace(shape, settings=tuple(settings.items())),
                launch=launch,
                settings=settings,
                split=split,
            )
            for settings in ways
        ]

    def _engines(self, count: int, batch: int) -> Candidate:
        shape = Shape(0, count, batch, (0, self._narrower[1] if count > 1 else 0))
        name = f"aggregated: {counted(count, 'engine')}{self._each(count)}{_batch(batch)}"
        launch = self._graph(f"{count} x {batch}", name, shape)
        return Candidate(name, True, shape, launch, split=counted(count, "engine"))

    def _one_engine(self, batch: int, threads: int = 0) -> Candidate:
        """On GPUs over all of them; on the CPU with so many threads."""
        here, decode = self.here, self.config.decode
        assert decode is not None
        on_gpu = here.kind is HardwareKind.GPU
        tensor = here.units if on_gpu and here.units != decode.ranks else 0
        each = f" x {counted(threads, 'thread')}" if threads else self._each(1)
        name = f"aggregated: 1 engine{each}{_batch(batch)}"
        plan, ranks = make_plan(self.config, self.machine), here.units if on_gpu else 1
        system = one_engine(plan, name, tensor=ranks, threads=threads, batch=batch)
        memory = 0.0 if on_gpu else 2.1 + CPU_KV_GIB * here.slots + self._weights_gib
        launch = Launch(f"vllm{each}{_batch(batch)}", system, memory)
        shape = Shape(0, 1, batch, (0, tensor))
        return Candidate(name, True, shape, launch, split="1 engine", threads=threads % here.units)

    @property
    def _has_one_engine(self) -> bool:
        """Whether one engine can have all of it: a tensor-parallel one divides the heads among its ranks."""
        decode = self.config.decode
        if self.here.kind is HardwareKind.SIM:
            return False
        if self.here.kind is HardwareKind.CPU or decode is None or self.here.units == decode.ranks:
            return True
        if self.model is None or decode.ranks != tensor_size(decode.engine_args):
            return False
        return divides(self.here.units, self.model)

    def _each(self, count: int) -> str:
        if self.here.kind is HardwareKind.SIM:
            return ""
        noun = "GPU" if self.here.kind is HardwareKind.GPU else "thread"
        return f" x {counted(max(1, self.here.units // count), noun)}"

    def _batches(self, wanted: Sequence[int]) -> list[int]:
        """The file's own first. vLLM wants them no smaller than max-num-seqs."""
        args = self.config.decode.engine_args if self.config.decode else {}
        workers = [worker for worker in (self.config.decode, self.config.prefill) if worker is not None]
        most = sum(int(str(each.engine_args.get("max-num-seqs", 256))) * each.count for each in workers)
        if self.here.kind is HardwareKind.SIM:
            most = 1
        sizes = list(wanted or BATCHES[self.here.kind])
        if (own := args.get("max-num-batched-tokens")) is not None:
            sizes = [int(str(own)), *filter(None, sizes)]
        kept = list(dict.fromkeys(size for size in sizes if size >= most or not size))
        if not kept:
            raise ConfigError([f"--batch-sizes: vLLM takes none below max-num-seqs, {most} of all workers."])
        return kept

    def _graph(self, key: str, name: str, shape: Shape) -> Launch:
        sections = with_model(reshape(self.base, shape), self.config.model)
        workers = shape.prefill + shape.decode
        each = {"cpu": 2.1 + CPU_KV_GIB + self._weights_gib, "sim": 0.2}
        memory = 1.0 + each[self.here.kind] * workers if self.here.kind in each else 0.0
        return Launch(key, GraphSystem(name, sections), memory)


def _batch(size: int) -> str:
    return f", batch {size}" if size else ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
