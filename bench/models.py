"""The model that a measurement runs on: one that was named, or random weights of a 0.5B shape made for it."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import random_model
from bench.shape import PRESETS

VOCABULARY = 1_000
"""Random prompts are of the ids from 10 up to this, which every model has."""


@contextlib.contextmanager
def model(given: Path | None) -> Iterator[Path]:
    """The path of a GGUF file."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        path = Path(folder) / "random-0.5b-q8_0.gguf"
        random_model.write(path, PRESETS["0.5b"], "q8_0", threads=2)
        yield path
