"""Detected machines, and imagined ones of `--gpus`."""

import re
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from pdserve.plan import machine as module
from pdserve.plan.machine import GIB, MIB, Gpu, Machine, visible, what_if
from pdserve.util.errors import ConfigError
from tests.plan.models import machine


@pytest.mark.parametrize(
    ("text", "names", "gib"),
    [
        ("1xh100", ["H100"], 79.19),
        ("2x24G", ["GPU of 24 GiB"] * 2, 24.0),
        ("8xA100-80GB", ["A100-80GB"] * 8, 79.25),
    ],
)
def test_what_if_makes_the_described_gpus(text: str, names: list[str], gib: float) -> None:
    found = what_if(text, machine())
    assert [gpu.name for gpu in found.gpus] == names
    assert found.gpus[0].memory / GIB == pytest.approx(gib, abs=0.01)
    assert [gpu.index for gpu in found.gpus] == list(range(len(names)))
    assert (found.cores, found.build, found.imagined) == (8, "cuda", True)
    without = what_if("0", found)
    assert (without.gpus, without.build) == ((), "cpu")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A10", "is not a number and a kind of GPU"),
        ("0xA10", "is not a number and a kind of GPU"),
        ("4xA11", "give its memory, as in 4x24GiB, or use one of: T4, "),
        ("8xH20", "give its memory, as in 4x24GiB, or use one of: T4, "),
        ("8xA100", "did you mean A100-40GB or A100-80GB?"),
        ("4xRTX-4090", "did you mean RTX4090?"),
        ("4xRiva", "give its memory, as in 4x24GiB, or use one of: T4, "),
    ],
)
def test_what_if_refuses_unknown_gpus(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        what_if(text, machine())


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("2,0", [2, 0]), ("GPU-b", [1]), ("1,9,0", [1]), ("GPU-", [])],
)
def test_cuda_visible_devices_selects_gpus(chosen: str | None, expected: list[int]) -> None:
    gpus = [Gpu(0, "x", 1, "GPU-a1"), Gpu(1, "x", 1, "GPU-b1"), Gpu(2, "x", 1, "GPU-c1")]
    assert [gpu.index for gpu in visible(gpus, chosen)] == expected


@pytest.mark.parametrize(("driver_tells", "expected"), [(True, 22_516), (False, 23_028)])
def test_memory_that_the_driver_reserves_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, driver_tells: bool, expected: int
) -> None:
    """An A10: NVML's total is 22.49 GiB, CUDA's 21.99."""

    def memory_info(_handle: object, version: int | None = None) -> SimpleNamespace:
        if version is not None and not driver_tells:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=23_028 * MIB, reserved=512 * MIB)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA A10")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda _: "GPU-1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_info)
    found = Machine.detect({})
    assert found.gpus == (Gpu(0, "NVIDIA A10", expected * MIB, "GPU-1"),)
    assert found.shared is None or found.shared > 0
    assert Machine.detect({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


@pytest.mark.parametrize(
    ("marker", "hardware", "expected"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["docker run", "docker run --network host", "no container"],
)
def test_a_container_without_hardware_devices_has_its_own_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: bool, hardware: bool, expected: bool
) -> None:
    (tmp_path / "net/eth0").mkdir(parents=True)
    if hardware:
        (tmp_path / "net/eth0/device").symlink_to("/sys")
    (tmp_path / ".dockerenv").touch() if marker else None
    monkeypatch.setattr(module, "_CONTAINER", (tmp_path / ".dockerenv", tmp_path / ".containerenv"))
    monkeypatch.setattr(module, "_NETWORK", tmp_path / "net")
    assert Machine.detect({}).own_network is expected
