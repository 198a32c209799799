"""Writes a GGUF file with random weights of a model whose state can't be cut at a token.

    python -m tests.support.models.random_stateful OUT.gguf --kind hybrid --preset 0.5b

The kinds are `hybrid` (LFM2: convolutions and attention), `recurrent` (Mamba) and `window` (Gemma 3: five of six layers
attend to a window).
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.models import random_model, random_vocabulary

KINDS = ("hybrid", "recurrent", "window")
_ARCHITECTURES = {"hybrid": "lfm2", "recurrent": "mamba", "window": "gemma3"}
_STATE_SIZE, _CONVOLUTION = 16, 4
_SHORT_CONVOLUTION = 3

Array = npt.NDArray[np.float32]


class StatefulShape(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int
    context: int = 32_768
    window: int = 512

    @property
    def head_size(self) -> int:
        return self.width // self.heads


TINY = StatefulShape(layers=6, width=64, feed_forward=128, heads=2, kv_heads=1, vocab=384, window=16)
PRESETS = {
    "tiny": TINY,
    "small": StatefulShape(layers=6, width=512, feed_forward=1_536, heads=8, kv_heads=2, vocab=8_000),
    "0.5b": StatefulShape(layers=24, width=896, feed_forward=4_864, heads=14, kv_heads=2, vocab=32_000),
}


def write(
    path: Path, kind: str, shape: StatefulShape, *, quantized: bool = False, tied: bool = True, seed: int = 0
) -> None:
    """Writes a model of one of `KINDS`; the same arguments give the same bytes. Matrices are f32, or Q8_0. With `tied`,
    the embedding is also the output matrix."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[kind])
    writer.add_name(f"Tokenbus random {kind}")
    _add_shape(writer, kind, shape)
    random_model.add_vocabulary(writer, random_vocabulary.build(shape.vocab))
    rng = random_model.generator(seed)
    for name, size in _tensors(kind, shape, tied=tied):
        weights = _weights(name, size, rng)
        if quantized and name.endswith("weight") and len(size) == 2 and "conv" not in name:
            quants = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quants, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, kind: str, shape: StatefulShape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_layer_norm_rms_eps(random_model.NORM_EPSILON)
    writer.add_vocab_size(shape.vocab)
    if kind == "recurrent":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(_CONVOLUTION)
        writer.add_ssm_inner_size(2 * shape.width)
        writer.add_ssm_state_size(_STATE_SIZE)
        writer.add_ssm_time_step_rank(_time_step_rank(shape))
        return
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_rope_freq_base(random_model.ROPE_BASE)
    if kind == "hybrid":
        writer.add_head_count_kv([shape.kv_heads * _attends(layer) for layer in range(shape.layers)])
        writer.add_shortconv_l_cache(_SHORT_CONVOLUTION)
    else:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
        writer.add_sliding_window(shape.window)


def _tensors(kind: str, shape: StatefulShape, *, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (shape.vocab, shape.width)
    yield ("token_embd_norm.weight" if kind == "hybrid" else "output_norm.weight"), (shape.width,)
    for layer in range(shape.layers):
        for name, size in _layer(kind, shape, layer).items():
            yield f"blk.{layer}.{name}", size
    if not tied:
        yield "output.weight", (shape.vocab, shape.width)


def _layer(kind: str, shape: StatefulShape, layer: int) -> dict[str, tuple[int, ...]]:
    width, inner = shape.width, 2 * shape.width
    if kind == "recurrent":
        rank = _time_step_rank(shape)
        return {
            "attn_norm.weight": (width,),
            "ssm_in.weight": (2 * inner, width),
            "ssm_conv1d.weight": (inner, _CONVOLUTION),
            "ssm_conv1d.bias": (inner,),
            "ssm_x.weight": (rank + 2 * _STATE_SIZE, inner),
            "ssm_dt.weight": (inner, rank),
            "ssm_dt.bias": (inner,),
            "ssm_a": (inner, _STATE_SIZE),
            "ssm_d": (inner,),
            "ssm_out.weight": (width, inner),
        }
    block = {
        "attn_norm.weight": (width,),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (shape.feed_forward, width),
        "ffn_up.weight": (shape.feed_forward, width),
        "ffn_down.weight": (width, shape.feed_forward),
    }
    if kind == "hybrid" and not _attends(layer):
        return block | {
            "shortconv.conv.weight": (width, _SHORT_CONVOLUTION),
            "shortconv.in_proj.weight": (3 * width, width),
            "shortconv.out_proj.weight": (width, width),
        }
    kv_width = shape.kv_heads * shape.head_size
    block |= {
        "attn_q.weight": (width, width),
        "attn_k.weight": (kv_width, width),
        "attn_v.weight": (kv_width, width),
        "attn_output.weight": (width, width),
        "attn_q_norm.weight": (shape.head_size,),
        "attn_k_norm.weight": (shape.head_size,),
    }
    if kind == "window":
        block |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return block


def _attends(layer: int) -> bool:
    return layer % 3 == 2


def _time_step_rank(shape: StatefulShape) -> int:
    return math.ceil(shape.width / 16)


def _weights(name: str, size: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Returns initial weights that keep activations near 1."""
    if name.endswith("ssm_a"):
        return np.tile(-np.arange(1, size[1] + 1, dtype=np.float32), (size[0], 1))
    if name.endswith(("norm.weight", "ssm_d")):
        return np.ones(size, np.float32)
    if name.endswith("bias"):
        return rng.standard_normal(size, np.float32)
    std = 0.02 if name == "token_embd.weight" else 1 / math.sqrt(size[-1])
    return rng.standard_normal(size, np.float32) * np.float32(std)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.models.random_stateful", allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="0.5b", help="the shape (%(default)s)")
    options = parser.parse_args()
    write(options.out, options.kind, PRESETS[options.preset], quantized=options.preset != "tiny")


if __name__ == "__main__":
    main()
