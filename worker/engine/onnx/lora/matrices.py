"""The matrices of adapters as the graph takes them: for each projection `a` of (inputs, rank) and `b` of (rank,
outputs).

The changes of several adapters add up, and so do those of projections that one node computes: their matrices are
concatenated along the rank, and `b` is zero for the outputs of other projections."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import numpy as np

from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.lora.projections import Place, Projection


class Change(NamedTuple):
    """The matrices of one projection in an adapter, as trained: `b @ a @ x` is added."""

    a: Array
    """(rank, inputs)"""
    b: Array
    """(outputs, rank), including the adapter's own scale."""


class OnnxAdapter:
    """The matrices of one adapter, by input of the graph."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def __repr__(self) -> str:
        return f"<OnnxAdapter of {len(self.arrays)} matrices>"

    def close(self) -> None:
        """Frees the matrices."""
        self.arrays = {}


def arrange(changes: Mapping[Place, Change], projections: Iterable[Projection]) -> dict[str, Array]:
    """Returns the inputs of the graph for an adapter whose matrices have the shapes of the projections."""
    arrays: dict[str, Array] = {}
    for projection in projections:
        found = [(columns, changes[place]) for place, columns in projection.parts.items() if place in changes]
        if not found:
            continue
        rank = sum(len(change.a) for _, change in found)
        b = np.zeros((rank, projection.outputs), projection.dtype)
        at = 0
        with np.errstate(over="ignore"):  # values out of range become infinite
            for columns, change in found:
                b[at : at + len(change.a), columns] = change.b.T
                at += len(change.a)
            arrays[projection.a] = np.concatenate([change.a.T for _, change in found], axis=1).astype(projection.dtype)
        arrays[projection.b] = b
    return arrays


def combine(adapters: Listing[tuple[OnnxAdapter, float]]) -> dict[str, Array]:
    """Returns the inputs of the graph for a set of adapters with their scales."""
    names = {name for adapter, _ in adapters for name in adapter.arrays}
    combined: dict[str, Array] = {}
    for name in names:
        is_b = name.endswith(".b")
        found = [
            _scaled(adapter.arrays[name], scale if is_b else 1.0)
            for adapter, scale in adapters
            if name in adapter.arrays
        ]
        combined[name] = found[0] if len(found) == 1 else np.concatenate(found, axis=0 if is_b else 1)
    return combined


def _scaled(array: Array, scale: float) -> Array:
    scaled: Array = array if scale == 1.0 else array * array.dtype.type(scale)
    return scaled


def no_adapters(projections: Iterable[Projection]) -> dict[str, Array]:
    """Returns inputs that change nothing: of rank 1, since an empty matrix is a special case for every kernel."""
    arrays: dict[str, Array] = {}
    zeros: dict[tuple[Any, ...], Array] = {}
    for one in projections:
        for name, shape in ((one.a, (one.inputs, 1)), (one.b, (1, one.outputs))):
            arrays[name] = zeros.setdefault((shape, one.dtype), np.zeros(shape, one.dtype))
    return arrays
