"""Which worker gets which GPUs: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    worker: str
    gpus: int
    pinned: tuple[int, ...] = ()
    """exactly these, `gpus` of them; they may be shared with other pinned workers"""


@dataclass(frozen=True)
class Placement:
    gpus: Mapping[str, tuple[int, ...]]
    """by worker; empty for one on the CPU, and for one that found no room"""
    problems: list[str] = field(default_factory=list)


def place(requests: Sequence[Request], gpus: Sequence[int]) -> Placement:
    """Pinned workers get their GPUs; the others, in order, each a group of neighbours (which share the
    fastest links) of what is left, or any where there is no such group."""
    pinned = {index for request in requests for index in request.pinned}
    free = [index for index in sorted(gpus) if index not in pinned]
    found: dict[str, tuple[int, ...]] = {}
    for request in requests:
        group = request.pinned or _group(free, request.gpus)
        found[request.worker] = group
        free = [index for index in free if index not in group]
    return Placement(found, [*_missing(requests, gpus), *_too_few(requests, found, gpus)])


def _group(free: Sequence[int], count: int) -> tuple[int, ...]:
    if count == 0 or len(free) < count:
        return ()
    for start in range(len(free) - count + 1):
        group = free[start : start + count]
        if group[-1] - group[0] == count - 1:
            return tuple(group)
    return tuple(free[:count])


def _missing(requests: Sequence[Request], gpus: Sequence[int]) -> list[str]:
    absent = sorted({index for request in requests for index in request.pinned} - set(gpus))
    if not absent:
        return []
    have = ", ".join(map(str, gpus)) or "none"
    names = ", ".join(map(str, absent))
    return [f"gpu-ids asks for GPU {names}, but there are {have}: correct gpu-ids or CUDA_VISIBLE_DEVICES."]


def _too_few(
    requests: Sequence[Request], found: Mapping[str, tuple[int, ...]], gpus: Sequence[int]
) -> list[str]:
    if all(len(found[request.worker]) == request.gpus for request in requests):
        return []
    pinned = {index for request in requests for index in request.pinned}
    needed = sum(request.gpus for request in requests if not request.pinned) + len(pinned)
    each = ", ".join(f"{request.gpus} for {request.worker}" for request in requests if request.gpus)
    return [
        f"The graph needs {needed} GPU{'s' * (needed != 1)} ({each}), found {len(gpus)}: run it where there "
        f"are {needed}, lower tensor-parallel-size or ServiceArgs.workers, or set resources.gpu: 0 to run on "
        "the CPU."
    ]
