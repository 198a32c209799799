"""The model that an adapter is for, as far as adapters need to know it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenbus.worker.engine.onnx.lora.projections import Place, Projection

MAX_RANK = 1_024


class Base(NamedTuple):
    """The projections of a model with their inputs and outputs."""

    sizes: Mapping[Place, tuple[int, int]]
    architecture: str
    """The name of its transformers class without the task, in lower case; empty if unknown."""
    head_width: int


def make(projections: Iterable[Projection], architecture: str, head_width: int) -> Base:
    sizes = {
        place: (one.inputs, columns.stop - columns.start) for one in projections for place, columns in one.parts.items()
    }
    return Base(sizes, architecture, head_width)
