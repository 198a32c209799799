"""Writes a GGUF file with random weights of a model that makes embeddings or scores documents.

    python -m tests.support.models.random_encoder OUT.gguf --preset minilm

Models of the architecture `qwen3` attend to the tokens before each token, the others to the whole input. The vectors
are noise."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tests.support.models import random_vocabulary
from tokenbus.protocol.telemetry import logs
from tools.demo_model import chats

EPSILON = 1e-6
ROPE_BASE = 10_000.0
RERANK_TEMPLATE = f"{chats.BOS}Judge:\n{{query}}\n{chats.END}Document: {{document}}{chats.END}"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'"


class EncoderShape(NamedTuple):
    """The sizes of a model. Every head is `width // heads` wide."""

    arch: str
    """`bert`, `nomic-bert`, `jina-bert-v2`, `qwen3` or `gemma-embedding`."""
    pooling: str | None
    """The pooling that the file names: `mean`, `cls`, `last` or `rank`; None names none."""
    layers: int = 2
    width: int = 64
    feed_forward: int = 128
    heads: int = 4
    vocab: int = 400
    context: int = 96


PRESETS = {
    "tiny": EncoderShape("bert", "mean"),
    "minilm": EncoderShape("bert", "mean", 6, 384, 1_536, 12, 30_522, 512),
    "minilm-reranker": EncoderShape("bert", "rank", 6, 384, 1_536, 12, 30_522, 512),
    # The layers of Qwen3-Embedding-0.6B are 28; a quarter of them fits small machines.
    "qwen3": EncoderShape("qwen3", "last", 7, 1_024, 3_072, 16, 151_669, 32_768),
}

Weights = dict[str, np.ndarray]


def write(path: Path, shape: EncoderShape, *, seed: int = 0, half: bool = False, labels: tuple[str, ...] = ()) -> None:
    """Writes the model. The same arguments give the same bytes. `half` stores matrices in 16 bits.

    `labels` are the classes of a BERT's classification head; without any it gives one score."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name("Tokenbus random encoder")
    _add_shape(writer, shape)
    if labels:
        writer.add_classifier_output_labels(labels)
    _add_vocabulary(writer, shape)
    for name, weights in _weights(shape, max(1, len(labels)), np.random.Generator(np.random.PCG64(seed))):
        is_half = half and weights.ndim == 2 and name not in ("position_embd.weight", "token_types.weight")
        writer.add_tensor(name, weights.astype(np.float16) if is_half else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, shape: EncoderShape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    if shape.pooling is not None:
        writer.add_pooling_type(gguf.PoolingType[shape.pooling.upper()])
    if "bert" in shape.arch:
        writer.add_layer_norm_eps(EPSILON)
        writer.add_causal_attention(False)
    else:
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_head_count_kv(shape.heads)
        writer.add_rope_freq_base(ROPE_BASE)
        if shape.arch == "gemma-embedding":
            writer.add_sliding_window(shape.context // 4)
        if shape.pooling == "rank":
            writer.add_classifier_output_labels(["yes", "no"])


def _add_vocabulary(writer: gguf.GGUFWriter, shape: EncoderShape) -> None:
    if "bert" in shape.arch:
        texts, kinds = _words(shape.vocab)
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        for name, add in (
            ("[UNK]", writer.add_unk_token_id), ("[CLS]", writer.add_bos_token_id), ("[SEP]", writer.add_sep_token_id),
            ("[PAD]", writer.add_pad_token_id), ("[MASK]", writer.add_mask_token_id),
        ):  # fmt: skip
            add(texts.index(name))
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        return
    vocabulary = random_vocabulary.build(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.texts.index(chats.END))
    writer.add_add_bos_token(False)
    # As in Qwen3-Embedding, whose vector is the hidden state of the end token.
    writer.add_add_eos_token(shape.pooling != "rank")
    if shape.pooling == "rank":
        writer.add_chat_template([{"name": "rerank", "template": RERANK_TEMPLATE}])


def _words(size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Returns a WordPiece vocabulary as GGUF files have it: words begin with "▁", and the rest of a word does not."""
    texts = [*_SPECIAL, *(f"▁{letter}" for letter in _LETTERS), *_LETTERS]
    invented = (f"▁{text[1:]}" for text in random_vocabulary.build(max(size, random_vocabulary.SMALLEST)).texts[400:])
    texts = [*dict.fromkeys([*texts, *invented])][:size]
    texts += [f"[unused{number}]" for number in range(size - len(texts))]
    kinds = [gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (size - len(_SPECIAL))
    return texts, kinds


def _weights(shape: EncoderShape, num_labels: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every weight under llama.cpp's name for it. A matrix has the shape (outputs, inputs)."""
    parts = _bert(shape, num_labels) if "bert" in shape.arch else _qwen3(shape)
    for name, size in parts:
        std = 1.0 if name.endswith("_embd.weight") else 1 / math.sqrt(size[-1])
        if len(size) == 1:
            yield name, (rng.standard_normal(size) * 0.1 + (name.endswith("norm.weight"))).astype(np.float32)
        else:
            yield name, (rng.standard_normal(size, np.float32) * np.float32(std))


def _bert(shape: EncoderShape, num_labels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = (shape.width,), (shape.feed_forward,)
    yield "token_embd.weight", (shape.vocab, *width)
    yield "token_types.weight", (2, *width)
    if shape.arch == "bert":
        yield "position_embd.weight", (shape.context, *width)
    layer: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("attn_q", width * 2), ("attn_k", width * 2), ("attn_v", width * 2), ("attn_output", width * 2),
        ("attn_output_norm", width), ("ffn_up", inner + width), ("ffn_down", width + inner),
        ("layer_output_norm", width),
    )  # fmt: skip
    if shape.arch != "bert":
        layer = (*layer, ("ffn_gate", inner + width))
    named = [(f"blk.{number}.{part}", size) for number in range(shape.layers) for part, size in layer]
    for name, size in [("token_embd_norm", width), *named]:
        yield f"{name}.weight", size
        if not name.endswith("gate"):
            yield f"{name}.bias", size[:1]
    if shape.pooling == "rank":
        yield "cls.weight", width * 2
        yield "cls.bias", width
        yield "cls.output.weight", (num_labels, *width)
        yield "cls.output.bias", (num_labels,)


def _qwen3(shape: EncoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, head = (shape.width,), (shape.feed_forward,), (shape.width // shape.heads,)
    yield "token_embd.weight", (shape.vocab, *width)
    yield "output_norm.weight", width
    parts: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("attn_norm", width), ("attn_q", width * 2), ("attn_k", width * 2), ("attn_v", width * 2),
        ("attn_output", width * 2), ("attn_q_norm", head), ("attn_k_norm", head), ("ffn_norm", width),
        ("ffn_gate", inner + width), ("ffn_up", inner + width), ("ffn_down", width + inner),
    )  # fmt: skip
    if shape.arch == "gemma-embedding":
        parts = (*parts, ("post_attention_norm", width), ("post_ffw_norm", width))
    for layer in range(shape.layers):
        for part, size in parts:
            yield f"blk.{layer}.{part}.weight", size
    if shape.pooling == "rank":
        yield "cls.output.weight", (2, *width)


def main() -> None:
    logs.configure("bench")
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.models.random_encoder",
        description="Write a GGUF file with random weights that makes embeddings, or scores documents.",
        allow_abbrev=False,
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--preset", choices=PRESETS, default="minilm", help="the shape (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (%(default)s)")
    options = parser.parse_args()
    write(options.out, PRESETS[options.preset], seed=options.seed, half=True)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
