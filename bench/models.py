"""The model that a measurement runs on: one that was named, or random weights of a 0.5B shape made for it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import random_model, random_onnx
from bench.shape import PRESETS

VOCABULARY = 1_000
"""Random prompts are of the ids from 10 up to this, which every model has."""


def model(given: Path | None) -> contextlib.AbstractContextManager[Path]:
    """The path of a GGUF file."""
    return _made(
        given, "random-0.5b-q8_0.gguf", lambda path: random_model.write(path, PRESETS["0.5b"], "q8_0", threads=2)
    )


def onnx_model(given: Path | None) -> contextlib.AbstractContextManager[Path]:
    """The path of a folder, in F32 with GroupQueryAttention."""
    return _made(given, "random-0.5b-onnx", lambda path: random_onnx.write(path, PRESETS["0.5b"]))


def same_in_gguf(given: Path | None) -> contextlib.AbstractContextManager[Path]:
    """The path of a GGUF file with the weights of `onnx_model`."""
    return _made(given, "random-0.5b-f32.gguf", lambda path: random_model.write(path, PRESETS["0.5b"], "f32"))


@contextlib.contextmanager
def _made(given: Path | None, name: str, write: Callable[[Path], None]) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        write(Path(folder) / name)
        yield Path(folder) / name
