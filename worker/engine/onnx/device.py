"""Chooses the device that a graph runs on, and measures its free memory."""

import ctypes
import re
from typing import NamedTuple

import onnxruntime

from tokenbus.worker.contract.contract import EngineDevice
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import HOST, DeviceMemory

EXECUTION_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_NAME = re.compile(r"cpu|cuda:\d{1,3}")
_CUDA_RUNTIMES = ("libcudart.so.12", "libcudart.so.13")


class Device(NamedTuple):
    """The place of graph and cache: `cpu`, or `cuda` with the number of a GPU."""

    kind: str
    number: int = 0


def named(name: str) -> Device | None:
    """Returns the device of a name such as `cpu` or `cuda:0`; None for any other name."""
    kind, _, number = name.partition(":")
    return Device(kind, int(number or 0)) if _NAME.fullmatch(name) else None


def choose(settings: EngineSettings) -> Device:
    """Raises ModelError if a GPU was requested and can't be used."""
    given = named(settings.devices[0]) if settings.devices else None
    wanted, number = given or (settings.onnx.provider, settings.onnx.device_id)
    why_not = "it was not requested" if wanted == "cpu" else _why_no_cuda(number)
    if given and why_not and wanted == "cuda":
        raise ModelError(f"--devices {settings.devices[0]}: {why_not}; pass --devices cpu, or leave it out")
    if wanted == "cuda" and why_not:
        raise ModelError(f"--provider cuda: {why_not}; pass --provider cpu, or auto to have it chosen")
    return Device("cpu") if why_not else Device("cuda", number)


def describe(device: Device) -> EngineDevice:
    """Returns a device as cards show it."""
    if device.kind == "cpu":
        return EngineDevice(name=HOST, kind="cpu")
    return EngineDevice(name=f"{device.kind}:{device.number}", kind="gpu")


def memory(device: Device) -> DeviceMemory | None:
    """Returns the memory of a device, or None if the system doesn't say."""
    return device_memory.host() if device.kind == "cpu" else _gpu_memory(device)


def free_bytes(device: Device) -> int | None:
    """Returns the memory that could be allocated now, or None if the system doesn't say."""
    found = memory(device)
    return found.free_bytes if found is not None else None


def _why_no_cuda(number: int) -> str:
    """Returns why onnxruntime can't use a GPU; empty if it can."""
    if EXECUTION_PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return "this onnxruntime was built without CUDA: the extra `onnx-gpu` has it, in place of `worker-onnx`"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or not count.value:
        return "the NVIDIA driver finds no GPU"
    return "" if number < count.value else f"there are GPUs 0 to {count.value - 1}, not {number}"


def _gpu_memory(device: Device) -> DeviceMemory | None:
    for name in _CUDA_RUNTIMES:
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        chosen = not runtime.cudaSetDevice(device.number)
        if chosen and not runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
            return DeviceMemory(f"{device.kind}:{device.number}", total.value, free.value)
    return None
