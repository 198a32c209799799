"""The sizes of a llama model, their limits, and the weights that follow from them."""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.models import random_vocabulary

_MOST_LAYERS = 512
"""llama.cpp's LLAMA_MAX_LAYERS: one more layer aborts the process that loads the model."""
_LARGEST = 2**31 - 1
_EMBEDDING_STD = 0.02


class ImpossibleModelError(ValueError):
    """There can be no such model. The text says why in one line."""


class Shape(NamedTuple):
    """The sizes of a model. A head is `width // heads` wide; each KV head serves `heads // kv_heads` heads."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int
    """Size of the vocabulary."""
    context: int
    """Context length that the model claims to be trained for."""
    tied: bool = True
    """Whether the embedding is also the output matrix."""


PRESETS = {
    # The narrowest shape whose rows are whole blocks of a K-quant, so that nothing falls back to another type.
    "tiny": Shape(layers=2, width=256, feed_forward=512, heads=4, kv_heads=2, vocab=384, context=1_024),
    "demo": Shape(layers=4, width=128, feed_forward=384, heads=4, kv_heads=2, vocab=512, context=2_048),
    # Qwen2-0.5B without its biases.
    "0.5b": Shape(layers=24, width=896, feed_forward=4_864, heads=14, kv_heads=2, vocab=151_936, context=32_768),
}
SIZES = tuple(name for name in Shape._fields if name != "tied")
"""The numeric fields of a shape."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that describe a shape."""
    parser.add_argument("--preset", choices=PRESETS, default="0.5b", help="the shape (%(default)s)")
    sizes = parser.add_argument_group("instead of the preset's")
    for name in SIZES:
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    sizes.add_argument("--tied", action=argparse.BooleanOptionalAction, help="use the embedding as output too")


def shape_of(options: argparse.Namespace) -> Shape:
    """Returns the shape that the flags describe."""
    given = {name: getattr(options, name) for name in Shape._fields if getattr(options, name) is not None}
    return PRESETS[options.preset]._replace(**given)


class Tensor(NamedTuple):
    """A weight with llama.cpp's name. A matrix has the shape (outputs, inputs), a norm (inputs,)."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def std(self) -> float:
        """Standard deviation that keeps activations near 1 in every layer.

        A token's embedding is small compared with what the layers add to it. Otherwise, with a tied embedding, every
        token would be its own likeliest successor."""
        return _EMBEDDING_STD if self.name == "token_embd.weight" else 1 / math.sqrt(self.shape[-1])


def tensors(shape: Shape) -> list[Tensor]:
    """Yields every weight in the order of the file."""
    width, kv_width = shape.width, shape.width // shape.heads * shape.kv_heads
    parts = {
        "attn_norm": (width,), "attn_q": (width, width), "attn_k": (kv_width, width), "attn_v": (kv_width, width),
        "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (shape.feed_forward, width),
        "ffn_up": (shape.feed_forward, width), "ffn_down": (width, shape.feed_forward),
    }  # fmt: skip
    named = [Tensor("token_embd.weight", (shape.vocab, width)), Tensor("output_norm.weight", (width,))]
    named += [] if shape.tied else [Tensor("output.weight", (shape.vocab, width))]
    return named + [
        Tensor(f"blk.{layer}.{part}.weight", size) for layer in range(shape.layers) for part, size in parts.items()
    ]


def check(shape: Shape) -> None:
    """Raises ImpossibleModelError for a shape that llama.cpp would refuse to load or crash on."""
    for name in SIZES:
        if not 1 <= (value := getattr(shape, name)) <= _LARGEST:
            raise ImpossibleModelError(f"{name} must be 1 to {_LARGEST}, got {value}")
    for problem in _problems(shape):
        raise ImpossibleModelError(problem)


def _problems(shape: Shape) -> Iterator[str]:
    if shape.layers > _MOST_LAYERS:
        yield f"layers must be at most {_MOST_LAYERS}, got {shape.layers}"
    if shape.width % shape.heads:
        yield f"width {shape.width} is not divisible by heads {shape.heads}"
    if (head := shape.width // shape.heads) % 2:
        yield f"width {shape.width} makes {shape.heads} heads {head} wide; an odd width can't be rotated"
    if shape.heads % shape.kv_heads:
        yield f"heads {shape.heads} is not divisible by kv_heads {shape.kv_heads}"
    if shape.vocab < random_vocabulary.SMALLEST:
        yield f"vocab must be at least {random_vocabulary.SMALLEST}, got {shape.vocab}"
