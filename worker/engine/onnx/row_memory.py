"""Memory for rows of the cache, on the host or on a GPU."""

import ctypes
import math
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from tokenbus.worker.engine.onnx.graphs.graph import KvTensor
from tokenbus.worker.engine.onnx.graphs.session import Device

_RUNTIMES = ("libcudart.so.12", "libcudart.so.13")


class RowMemory(Protocol):
    """Rows of (heads, tokens, width)."""

    row_shape: tuple[int, int, int]

    def address(self, row: int) -> int:
        """Where a row begins; the next one lies right behind it."""
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Has the tokens `start` to `end` of a row in another; what lies behind them there may change."""
        ...


class HostRows:
    """Rows in the host's memory, which takes pages for them as they are written."""

    def __init__(self, kv: KvTensor, num_rows: int, row_tokens: int) -> None:
        self.row_shape = (kv.heads, row_tokens, kv.width)
        self._array = np.zeros((num_rows, *self.row_shape), kv.dtype)

    def address(self, row: int) -> int:
        return int(self._array.ctypes.data) + row * self._array.strides[0]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self._array[target, :, start:end] = self._array[source, :, start:end]


class DeviceRows:
    """Rows in a GPU's memory. A copy is of whole rows, by a graph that does nothing else."""

    def __init__(self, kv: KvTensor, num_rows: int, row_tokens: int, device: Device, copier: Any) -> None:
        self.row_shape = (kv.heads, row_tokens, kv.width)
        self._size = math.prod(self.row_shape)
        self._dtype = kv.dtype
        self._device = device
        self._copier = copier
        zeros = np.zeros((num_rows, *self.row_shape), kv.dtype)
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(zeros, device.kind, device.number)

    def address(self, row: int) -> int:
        return int(self._value.data_ptr()) + row * self._size * self._dtype.itemsize

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        binding = self._copier.io_binding()
        place = (self._device.kind, self._device.number, self._dtype.type, (self._size,))
        binding.bind_input("x", *place, self.address(source))
        binding.bind_output("y", *place, self.address(target))
        self._copier.run_with_iobinding(binding)


def allocate_rows(kv: tuple[KvTensor, ...], num_rows: int, row_tokens: int, device: Device) -> list[RowMemory]:
    """Memory for every tensor of a cache. Raises MemoryError, and what onnxruntime raises when a GPU has no room."""
    if device.kind == "cpu":
        return [HostRows(one, num_rows, row_tokens) for one in kv]
    copiers = {one.dtype: _copier(one, device) for one in kv}
    return [DeviceRows(one, num_rows, row_tokens, device, copiers[one.dtype]) for one in kv]


def free_bytes(device: Device) -> int | None:
    """Memory that could be had now; None where nobody says."""
    return _free_host_bytes() if device.kind == "cpu" else _free_device_bytes(device.number)


def _copier(kv: KvTensor, device: Device) -> Any:
    """A session that copies a tensor; onnxruntime offers no call for it."""
    kind = TensorProto.FLOAT16 if kv.dtype == np.float16 else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, ["size"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "copy", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    providers = [("CUDAExecutionProvider", {"device_id": str(device.number)})]
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)


def _free_host_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _free_device_bytes(number: int) -> int | None:
    for name in _RUNTIMES:
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        if not runtime.cudaSetDevice(number) and not runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
            return free.value
    return None
