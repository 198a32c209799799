"""A tensor of an architecture: its place in safetensors, and what it becomes in GGUF."""

import enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[Any]
"""Row or column numbers, in their target order."""


class TensorChange(enum.Enum):
    """A change to a tensor's values."""

    NONE = "as they are"
    ADD_ONE = "of a norm whose weights are stored as differences from 1"
    NEGATIVE_EXP = "of rates that are stored as logarithms"


class ExpectedTensor(NamedTuple):
    """A tensor of a GGUF file, with `{e}` in place of an expert's number in the name of its source."""

    source: str
    name: str
    shape: tuple[int, ...]
    is_needed: bool = True
    source_shape: tuple[int, ...] | None = None
    """The shape of the source, without the experts' dimension; None if it is the same."""
    rows: Order | None = None
    """The rows taken from the source; None for all in order. A vector has rows of one number."""
    columns: Order | None = None
    change: TensorChange = TensorChange.NONE


def rotated_rows(num_rows: int, heads: int) -> Order:
    """Returns the order of each head's rows that puts rotation partners, which were half a head apart, side by side."""
    return np.arange(num_rows).reshape(heads, 2, num_rows // heads // 2).swapaxes(1, 2).reshape(-1)
