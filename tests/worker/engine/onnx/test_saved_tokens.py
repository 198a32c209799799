"""Saved tokens that hold a number that is none are noticed, whichever tensor has it."""

import numpy as np
import pytest

from tokenbus.worker.engine.onnx import kv_cache
from tokenbus.worker.engine.onnx.graph import KvTensor


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_number_that_is_none_is_found_in_every_tensor(name: str) -> None:
    tensors = [KvTensor(f"past{n}", f"present{n}", 2, 3 + n, np.dtype(name)) for n in range(4)]
    for wrong in (np.nan, np.inf, -np.inf):
        for tensor in range(4):
            arrays = [np.full((2, 7, one.width), 60_000, one.dtype) for one in tensors]
            assert kv_cache.is_finite(tensors, kv_cache.pack_tokens(arrays))
            arrays[tensor][1, 6, 0] = wrong
            assert not kv_cache.is_finite(tensors, kv_cache.pack_tokens(arrays))
