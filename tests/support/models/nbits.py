"""Quantizes the linear layers of an ONNX graph to 4 or 8 bits with a scale for each block (MatMulNBits nodes).

onnxruntime's own quantizer needs a whole model in memory and another package, while the format is simple: every row of
a matrix (outputs, inputs) is split into blocks, and each block has one scale and its integers, offset by half their
range. 4-bit integers are packed two to a byte, the first one in the lower half."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.models.shape import ImpossibleModelError, Shape

BLOCK = 32
_INT8_ARITHMETIC = 4
"""`accuracy_level` of the nodes: activations are rounded to 8 bits, as in published models of this kind."""
_SLAB = 1 << 20
Array = np.ndarray[Any, np.dtype[Any]]


def check(shape: Shape, bits: int) -> None:
    """Raises ImpossibleModelError if rows can't be split into whole blocks."""
    for name, columns in (("width", shape.width), ("feed_forward", shape.feed_forward)):
        if bits != 32 and columns % BLOCK:
            raise ImpossibleModelError(f"{name} must be a multiple of {BLOCK} for {bits} bits, got {columns}")


class Quantized:
    """Quantizes tensors while `onnx_graph.build` builds a graph (as its `tensor`); `change` then adapts that graph."""

    def __init__(self, store: Callable[[str, Array], TensorProto], bits: int) -> None:
        self._store = store
        self._bits = bits
        self._scales: dict[str, Array] = {}

    def __call__(self, name: str, array: Array) -> TensorProto:
        if array.ndim != 2 or name == "token_embd.weight":
            return self._store(name, array)
        blobs, self._scales[name] = quantize(array.T, self._bits)
        return self._store(name, blobs)

    def change(self, model: onnx.ModelProto) -> None:
        """Replaces every MatMul with such a weight by a MatMulNBits node."""
        graph = model.graph
        for node in graph.node:
            if node.op_type == "MatMul" and node.input[1] in self._scales:
                outputs, blocks = self._scales[node.input[1]].shape
                node.input.append(f"{node.input[1]}.scales")
                sizes = {"K": blocks * BLOCK, "N": outputs, "bits": self._bits, "block_size": BLOCK}
                node.op_type, node.domain = "MatMulNBits", "com.microsoft"
                for key, value in (sizes | {"accuracy_level": _INT8_ARITHMETIC}).items():
                    node.attribute.append(helper.make_attribute(key, value))
        graph.initializer.extend(
            self._store(f"{name}.scales", scales.reshape(-1)) for name, scales in self._scales.items()
        )


def quantize(matrix: Array, bits: int) -> tuple[Array, Array]:
    """Quantizes a matrix (outputs, inputs) into integers (outputs, blocks, bytes) and scales (outputs, blocks)."""
    rows = max(1, _SLAB // matrix.shape[1])
    made = [_quantize(matrix[start : start + rows], bits) for start in range(0, len(matrix), rows)]
    return np.concatenate([blobs for blobs, _ in made]), np.concatenate([scales for _, scales in made])


def _quantize(rows: Array, bits: int) -> tuple[Array, Array]:
    blocks = rows.reshape(len(rows), -1, BLOCK)
    half = 1 << (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = largest / np.float32(-half)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    integers = np.clip(np.rint(blocks * inverse) + half, 0, 2 * half - 1).astype(np.uint8)
    blobs = integers if bits == 8 else integers[..., ::2] | integers[..., 1::2] << 4
    return blobs, scales[..., 0]
