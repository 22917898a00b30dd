"""The candidates of a comparison, from the user's file and the machine. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from pdserve.config.schema import Config, PrefillConfig, WorkerConfig
from pdserve.plan.checks import divides
from pdserve.plan.machine import Machine
from pdserve.plan.memory import tensor_size
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.plan import make_plan
from pdserve.plan.slots import gpus_needed
from pdserve.util.errors import ConfigError
from pdserve_bench.compare.one_engine import one_engine, thread_counts
from pdserve_bench.compare.systems import GraphSystem, System
from pdserve_bench.graphs.sections import Sections, Shape, reshape, with_model


class HardwareKind(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    SIM = "sim"


BATCHES: Mapping[HardwareKind, tuple[int, ...]] = {
    HardwareKind.CPU: (0, 512),
    HardwareKind.GPU: (512, 2048, 8192),
    HardwareKind.SIM: (128, 512, 2048),
}
"""Values of max-num-batched-tokens to try. Small ones keep gaps short, large ones prefill faster. 0: vLLM's default."""
W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True)
class Hardware:
    kind: HardwareKind
    units: int
    """GPUs, CPU threads, or simulated workers."""
    prefill_width: int = 1
    """How many of `places` a prefill worker takes."""
    decode_width: int = 1
    places: int = 0
    """What a split divides: GPUs; with CPU or simulated engines, workers."""

    def __str__(self) -> str:
        noun = {"gpu": "GPU", "cpu": "CPU thread", "sim": "simulated worker"}[self.kind]
        return counted(self.units, noun)


@dataclass(frozen=True)
class Candidate:
    name: str
    aggregated: bool
    shape: Shape
    """Workers in the file that --write names; one decode worker for plain vLLM."""
    system: System
    split: str = ""
    """`1P+1D`, or the number of engines."""
    threads: int = 0
    """OMP_NUM_THREADS of an engine; 0: one per core."""


def hardware(config: Config, machine: Machine) -> Hardware:
    """Return the hardware of the file's graph. Raises ConfigError if the workers cannot be compared."""
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
        return Hardware(kind, count, places=count)
    if kind is HardwareKind.CPU:
        return Hardware(kind, machine.cores, places=max(2, count))
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


def splits(here: Hardware, places: int) -> list[tuple[int, int]]:
    """Return (prefill workers, decode workers) that take exactly so many places."""
    found = []
    for prefill in range(1, places // here.prefill_width + 1):
        decode, rest = divmod(places - prefill * here.prefill_width, here.decode_width)
        if decode and not rest:
            found.append((prefill, decode))
    return found


def unequal(config: Config, machine: Machine, gpus: int) -> list[Shape]:
    """Return up to two splits of the GPUs. Decode workers have twice the ranks of prefill workers, or half as many
    (docs/decisions/0076-different-tensor-parallel-sizes.md). Workers have the fewest ranks that the plan accepts. Each
    role gets about half of the GPUs."""
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
    """Like `reshape`, but change only what the plan reads."""
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
    config: Config
    base: Sections
    here: Hardware
    machine: Machine
    model: ModelFacts | None = None

    def aggregated(self) -> list[Candidate]:
        """Return aggregated candidates, the most promising first: one engine with all of the hardware, at several
        settings, then as many of the file's engines as fit. If one engine cannot use all of the hardware, return only
        the latter, at several batch sizes."""
        first, *others = self._batches()
        if self.here.kind is HardwareKind.CPU:
            threads, *more = thread_counts(self.here.units)
            found = [self._one_engine(first, count) for count in (threads, *more)]
            found += [self._one_engine(size, threads) for size in others]
        elif self._has_one_engine:
            found = [self._one_engine(size) for size in (first, *others)]
        else:
            return [self._engines(size) for size in (first, *others)]
        return [*found, self._engines(first)] if self._fitting > 1 else found

    def disaggregated(self) -> list[Candidate]:
        """Return splits: the file's own or, if it has no prefill workers, the most balanced; then those with unequal
        ranks, then the others by similarity to the first."""
        own = self.own_split
        order = sorted(
            splits(self.here, self.here.places),
            key=lambda split: (abs(split[0] - own[0]), split[0]) if own else (abs(split[0] - split[1]), 0),
        )
        found = [self._split(Shape(*split, tensor=self._tensor_sizes)) for split in order]
        on_gpus = self.here.kind is HardwareKind.GPU
        other = unequal(self.config, self.machine, self.here.units) if on_gpus else []
        found[1:1] = map(self._split, other)
        return found

    @property
    def own_split(self) -> tuple[int, int] | None:
        """How many prefill and decode workers the file has; None if it lacks a role."""
        if self.config.prefill is None or self.config.decode is None:
            return None
        return self.config.prefill.count, self.config.decode.count

    @property
    def _fitting(self) -> int:
        """Number of the file's engines that fit on the hardware."""
        return max(1, self.here.places // self.here.decode_width)

    @property
    def _tensor_sizes(self) -> tuple[int, int]:
        """Tensor-parallel sizes of prefill and decode workers. 0: as in the file."""
        halved = self.here.kind is HardwareKind.GPU and self.config.prefill is None
        return (self.here.prefill_width, self.here.decode_width) if halved else (0, 0)

    def _split(self, shape: Shape) -> Candidate:
        """Return the candidate; its name has the GPUs per worker if they differ by role."""
        split = f"{shape.prefill}P+{shape.decode}D"
        name = f"{shape.prefill} prefill + {shape.decode} decode"
        wide_prefill, wide_decode = shape.tensor
        if wide_prefill != wide_decode:
            split = f"{shape.prefill}Px{wide_prefill}+{shape.decode}Dx{wide_decode}"
            name = f"{shape.prefill} prefill x {counted(wide_prefill, 'GPU')} + "
            name += f"{shape.decode} decode x {counted(wide_decode, 'GPU')}"
        return self._graph(name, shape, split)

    def _engines(self, batch: int) -> Candidate:
        count = self._fitting
        shape = Shape(0, count, batch, (0, self._tensor_sizes[1] if count > 1 else 0))
        engines = counted(count, "engine")
        return self._graph(
            f"aggregated: {engines}{self._hardware_of_each(count)}{_batch(batch)}", shape, engines
        )

    def _graph(self, name: str, shape: Shape, split: str) -> Candidate:
        sections = with_model(reshape(self.base, shape), self.config.model)
        return Candidate(name, not shape.prefill, shape, GraphSystem(sections), split)

    def _one_engine(self, batch: int, threads: int = 0) -> Candidate:
        """On GPUs, use all of them; on a CPU, `threads` threads."""
        here, decode = self.here, self.config.decode
        assert decode is not None
        on_gpu = here.kind is HardwareKind.GPU
        tensor = here.units if on_gpu and here.units != decode.ranks else 0
        each = f" x {counted(threads, 'thread')}" if threads else self._hardware_of_each(1)
        plan, ranks = make_plan(self.config, self.machine), here.units if on_gpu else 1
        return Candidate(
            f"aggregated: 1 engine{each}{_batch(batch)}",
            True,
            Shape(0, 1, batch, (0, tensor)),
            one_engine(plan, tensor=ranks, threads=threads, batch=batch),
            "1 engine",
            threads % here.units,
        )

    @property
    def _has_one_engine(self) -> bool:
        """Whether one engine can use all of the hardware: tensor parallelism must divide the heads."""
        decode = self.config.decode
        if self.here.kind is HardwareKind.SIM:
            return False
        if decode is None or self.here.units == decode.ranks:
            return True
        if self.model is None or decode.ranks != tensor_size(decode.engine_args):
            return False
        return divides(self.here.units, self.model)

    def _hardware_of_each(self, count: int) -> str:
        if self.here.kind is HardwareKind.SIM:
            return ""
        noun = "GPU" if self.here.kind is HardwareKind.GPU else "thread"
        return f" x {counted(max(1, self.here.units // count), noun)}"

    def _batches(self) -> list[int]:
        """Return batch sizes, the file's own first. vLLM refuses a batch size below max-num-seqs, which is here the sum
        over all workers."""
        args = self.config.decode.engine_args if self.config.decode else {}
        workers = [worker for worker in (self.config.decode, self.config.prefill) if worker is not None]
        seqs = sum(int(str(each.engine_args.get("max-num-seqs", 256))) * each.count for each in workers)
        if self.here.kind is HardwareKind.SIM:
            seqs = 1
        sizes = list(BATCHES[self.here.kind])
        if (own := args.get("max-num-batched-tokens")) is not None:
            sizes = [int(str(own)), *filter(None, sizes)]
        return list(dict.fromkeys(size for size in sizes if size >= seqs or not size)) or [0]


def _batch(size: int) -> str:
    return f", batch {size}" if size else ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
