"""Determines from a GGUF's metadata whether a model pools its tokens' states, and how. Needs no library."""

import enum

from tokenbus.worker.files.gguf_metadata import Metadata


class PoolingType(enum.Enum):
    """The ways in which llama.cpp makes one row from an input's tokens, with its numbers for them."""

    MEAN = 1
    CLS = 2
    """The state of the first token."""
    LAST = 3
    """The state of the last token."""
    RANK = 4
    """The output of a classification head for the first state, or for the last one in a causal model."""


def of_model(metadata: Metadata) -> PoolingType | None:
    """Returns the pooling that the file names; `MEAN` for an encoder whose file names none, as in
    sentence-transformers; None for a model that generates."""
    arch = metadata.text("general.architecture") or ""
    named = metadata.number(f"{arch}.pooling_type")
    if named in {one.value for one in PoolingType}:
        return PoolingType(named)
    return PoolingType.MEAN if "bert" in arch else None
