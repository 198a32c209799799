"""Memory for the rows of a static cache, on the host or on a GPU."""

import math
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from tokenbus.protocol.process import memory
from tokenbus.worker.engine.onnx.device import EXECUTION_PROVIDERS, Device
from tokenbus.worker.engine.onnx.graph import Array, KvTensor


class RowMemory(Protocol):
    """The rows of one tensor of the cache, each of (heads, tokens, width), contiguous."""

    row_shape: tuple[int, int, int]

    def address(self, row: int) -> int:
        """Returns the address of a row."""
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies the tokens `start` to `end` of a row to another; the tokens after them may change there too."""
        ...

    def erase(self, row: int, start: int, end: int) -> None:
        """Overwrites the tokens `start` to `end` of a row."""
        ...

    def release(self, row: int, start: int = 0) -> None:
        """Returns the memory of a row's tokens from `start` on to the system; it is zero when used again."""
        ...

    def view(self, row: int) -> Array:
        """Returns a row's memory, which must be in host memory."""
        ...


class HostRows:
    """Rows in host memory, which is allocated only as they are written.

    Small pages: with a long context, each head of each tensor would otherwise take a huge page for its first tokens."""

    def __init__(self, kv: KvTensor, num_rows: int, row_tokens: int) -> None:
        self.row_shape = (kv.heads, row_tokens, kv.width)
        self.array = np.zeros((num_rows, *self.row_shape), kv.dtype)
        memory.use_small_pages(self.address(0), self.array.nbytes)

    def address(self, row: int) -> int:
        return int(self.array.ctypes.data) + row * self.array.strides[0]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.array[target, :, start:end] = self.array[source, :, start:end]

    def erase(self, row: int, start: int, end: int) -> None:
        self.array[row, :, start:end] = 0

    def release(self, row: int, start: int = 0) -> None:
        if not start:
            memory.release_pages(self.address(row), self.array.strides[0])
            return
        _, head_bytes, token_bytes, _ = self.array.strides
        for head in range(self.row_shape[0]):
            first = self.address(row) + head * head_bytes + start * token_bytes
            memory.release_pages(first, head_bytes - start * token_bytes)

    def view(self, row: int) -> Array:
        tokens: Array = self.array[row]
        return tokens


class DeviceRows:
    """Rows in a GPU's memory. A whole row is copied at a time, by a graph that does nothing else."""

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

    def erase(self, row: int, start: int, end: int) -> None:
        pass  # GroupQueryAttention reads no token after a row's length, and no row but its own

    def release(self, row: int, start: int = 0) -> None:
        raise AssertionError("rows in a GPU's memory are not lent")

    def view(self, row: int) -> Array:
        raise AssertionError("the rows are in a GPU's memory, of which nothing is copied to the host")


def allocate_rows(kv: tuple[KvTensor, ...], num_rows: int, row_tokens: int, device: Device) -> list[RowMemory]:
    """Allocates memory for every tensor of a cache.

    Raises MemoryError, and whatever onnxruntime raises when a GPU has no room."""
    if device.kind == "cpu":
        return [HostRows(one, num_rows, row_tokens) for one in kv]
    copiers = {one.dtype: _copier(one, device) for one in kv}
    return [DeviceRows(one, num_rows, row_tokens, device, copiers[one.dtype]) for one in kv]


def _copier(kv: KvTensor, device: Device) -> Any:
    """Returns a session that copies a tensor on the GPU, for which onnxruntime offers no call."""
    element = TensorProto.FLOAT16 if kv.dtype == np.float16 else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, element, ["size"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "copy", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    providers = [(EXECUTION_PROVIDERS[device.kind], {"device_id": str(device.number)})]
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
