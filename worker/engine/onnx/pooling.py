"""What of the states of a text's tokens becomes its embedding."""

from pathlib import Path

import msgspec
import numpy as np

from tokenbus.worker.engine.models import generation_config
from tokenbus.worker.engine.onnx.arrays import Array

MODES = ("auto", "mean", "cls", "last")
SIDECAR = "1_Pooling/config.json"
"""Where models in the layout of sentence-transformers say it."""


class _Pooling(msgspec.Struct, frozen=True):
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


def choose(asked: str, sidecars: dict[str, Path], *, generates: bool) -> str:
    """A mode that is not `auto`. Raises ModelError naming a file that is wrong."""
    if asked != "auto":
        return asked
    said = generation_config.read_json(sidecars.get(SIDECAR), _Pooling)
    if said.pooling_mode_cls_token:
        return "cls"
    if said.pooling_mode_mean_tokens:
        return "mean"
    return "last" if said.pooling_mode_lasttoken or generates else "mean"


def pool(states: Array, lengths: Array, mode: str) -> Array:
    """(rows, tokens, width) of which each row has `lengths` tokens, from the first column on, to (rows, width)."""
    if mode == "cls":
        found: Array = states[:, 0]
    elif mode == "last":
        found = states[np.arange(len(states)), lengths - 1]
    else:
        shown = np.arange(states.shape[1]) < lengths[:, None]
        found = (states * shown[:, :, None]).sum(axis=1, dtype=np.float64) / lengths[:, None]
    return found.astype(np.float32)
