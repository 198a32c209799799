"""Saved tokens of a lane: for each tensor of the cache an array of (heads, tokens, width), one after another."""

from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.engine.host_cache import finite
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.graph import KvTensor
from tokenbus.worker.files import number_types

_NUMBER_TYPES = {"float32": number_types.F32, "float16": number_types.F16}


def bytes_per_token(tensors: Listing[KvTensor]) -> int:
    return sum(one.heads * one.width * one.dtype.itemsize for one in tensors)


def pack(arrays: Listing[Array]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def unpack(tensors: Listing[KvTensor], data: bytes | bytearray) -> list[Array]:
    """Returns an array for each tensor, with as many tokens as the data holds."""
    count = len(data) // bytes_per_token(tensors)
    arrays, offset = [], 0
    for one in tensors:
        size = one.heads * count * one.width
        arrays.append(np.frombuffer(data, one.dtype, size, offset).reshape(one.heads, count, one.width))
        offset += size * one.dtype.itemsize
    assert offset == len(data), (offset, len(data))
    return arrays


def is_finite(tensors: Listing[KvTensor], data: bytes | bytearray | memoryview) -> bool:
    """Whether all keys and values in saved tokens are finite."""
    view, offset = memoryview(data), 0
    count = len(data) // bytes_per_token(tensors)
    for one in tensors:
        end = offset + one.heads * count * one.width * one.dtype.itemsize
        if not finite.all_finite(view[offset:end], _NUMBER_TYPES[one.dtype.name]):
            return False
        offset = end
    return True
