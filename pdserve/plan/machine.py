"""Detects a machine's hardware: GPUs, cores, memory. Only this module asks NVML and psutil about hardware."""

import logging
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil
import pynvml

from pdserve.config.engine_args.installed import installed_vllm
from pdserve.config.files.yaml_tree import did_you_mean
from pdserve.util.errors import ConfigError
from pdserve.util.net import is_loopback, resolve_host

logger = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20
_RDMA = Path("/sys/class/infiniband")
_SHARED = Path("/dev/shm")
_CPUINFO = Path("/proc/cpuinfo")
_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman put into each container."""
_NETWORK = Path("/sys/class/net")
"""Has a folder for each network device. Those of hardware have a link `device`; a container's own network has none."""

_KNOWN_GPUS = {
    "T4": 14.56,
    "V100": 15.77,
    "L4": 22.03,
    "A10": 21.99,
    "A10G": 21.99,
    "RTX3090": 23.58,
    "RTX4090": 23.55,
    "RTX5090": 31.36,
    "A30": 23.59,
    "A40": 44.42,
    "L40S": 44.42,
    "A100-40GB": 39.39,
    "A100-80GB": 79.25,
    "H100": 79.19,
    "H200": 139.8,
    "B200": 178.35,
}
"""GiB of memory by name, as CUDA counts in logs of vLLM and torch. NVML counts 1 to 3 % more, which the driver
keeps."""


@dataclass(frozen=True)
class Gpu:
    index: int
    """in PCI order, as in nvidia-smi"""
    name: str
    memory: int
    """bytes as CUDA counts, by which vLLM sizes its KV cache"""
    uuid: str = ""


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    """those that CUDA_VISIBLE_DEVICES shows"""
    cores: int
    memory: int
    """total bytes of RAM"""
    build: str = "cuda"
    """of the installed vLLM: `cuda`, `cpu`, or empty without vLLM"""
    imagined: bool = False
    """true: the GPUs are those of `--gpus`, not this machine's"""
    devices: Mapping[str, str] = field(default_factory=dict)
    """network devices by address"""
    rdma: tuple[str, ...] = ()
    """RDMA ports, as UCX names them: `mlx5_0:1`"""
    shared: int | None = None
    """total bytes of /dev/shm; None: there is none"""
    own_network: bool = False
    """this is a container with its own network, whose published ports do not reach loopback addresses"""
    half_is_slow: bool = False
    """bfloat16 and float16 are slow, because oneDNN needs AVX-512 for them on x86"""

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        memory = psutil.virtual_memory()
        return cls(
            gpus=visible(_nvml_gpus(), env.get("CUDA_VISIBLE_DEVICES")),
            cores=len(os.sched_getaffinity(0)),
            memory=memory.total,
            build=installed_vllm().build,
            devices={
                entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries
            },
            rdma=tuple(f"{port.parts[-3]}:{port.name}" for port in sorted(_RDMA.glob("*/ports/*"))),
            shared=psutil.disk_usage(str(_SHARED)).total if _SHARED.is_dir() else None,
            own_network=any(map(Path.exists, _CONTAINER)) and not any(_NETWORK.glob("*/device")),
            half_is_slow=platform.machine() == "x86_64" and "avx512bw" not in _CPUINFO.read_text().split(),
        )

    def device(self, host: str) -> str | None:
        """Return the network device with an address of that host; None if this machine has none."""
        found = (self.devices.get("127.0.0.1" if is_loopback(each) else each) for each in resolve_host(host))
        return next(filter(None, found), None)


def free_disk(folder: Path) -> tuple[int, int] | None:
    """Return the device number and the free bytes of a folder's file system; None if nothing can be written there. The
    folder need not exist."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return None
    return existing.stat().st_dev, psutil.disk_usage(str(existing)).free


def in_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def what_if(gpus: str, machine: Machine) -> Machine:
    """Return the machine with other GPUs: `4xA10`, `2x24GiB`, or `0` for none. Raises ConfigError."""
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
        return plain, int(_KNOWN_GPUS[plain] * GIB)
    known = ", ".join(_KNOWN_GPUS)
    alike = [name for name in _KNOWN_GPUS if _digits(name)[:1] == _digits(plain)[:1]]  # A11 is not an A10
    hint = did_you_mean(plain, alike, f"give its memory, as in 4x24GiB, or use one of: {known}.")
    raise ConfigError([f"--gpus {gpus} names a GPU that pdserve does not know: {hint}"])


def _digits(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def visible(gpus: Sequence[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES (None: not set) shows: as in CUDA, up to the first invalid entry."""
    if chosen is None:
        return tuple(gpus)
    left: list[Gpu] = []
    for word in filter(None, (entry.strip() for entry in chosen.split(","))):
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
        logger.warning("NVML failed (%s): assuming that this machine has no GPUs", error)
        return []
    try:
        return [_nvml_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, name, _cuda_memory(handle), uuid)


def gpus_compute(indices: Iterable[int]) -> bool:
    """Whether any process ran a kernel on one of these GPUs within the last second; true if NVML fails."""
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, indices)
        return any(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles)
    except pynvml.NVMLError:
        return True


def _cuda_memory(handle: object) -> int:
    """Return NVML's total without the driver's part, as CUDA counts: 21.99 of 22.49 GiB on an A10. Drivers before 510
    do not report that part."""
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(info.total - info.reserved)
    except pynvml.NVMLError:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
