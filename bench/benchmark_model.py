"""The model of a measurement: the one given, or a temporary 0.5B model with random weights."""

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.models import random_model, random_onnx
from tests.support.models.shape import PRESETS

VOCABULARY = 600
"""Random prompts use ids from 10 up to this, which every model has, the demo model too."""


def prompt(serial: int, num_tokens: int) -> list[int]:
    """Returns the token ids of a prompt that shares no block with those of other serial numbers."""
    return [10 + (serial * 37 + place * place) % (VOCABULARY - 10) for place in range(num_tokens)]


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY) for _ in range(num_tokens)]


def model(given: Path | None) -> contextlib.AbstractContextManager[Path]:
    """Yields the path of a GGUF file."""
    return _made(
        given, "random-0.5b-q8_0.gguf", lambda path: random_model.write(path, PRESETS["0.5b"], "q8_0", threads=2)
    )


def onnx_model(given: Path | None) -> contextlib.AbstractContextManager[Path]:
    """Yields the path of an ONNX folder, in F32 with GroupQueryAttention."""
    return _made(given, "random-0.5b-onnx", lambda path: random_onnx.write(path, PRESETS["0.5b"]))


@contextlib.contextmanager
def _made(given: Path | None, name: str, write: Callable[[Path], None]) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        write(Path(folder) / name)
        yield Path(folder) / name
