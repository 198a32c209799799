"""Writes a GGUF file with random weights, of any llama shape and quantization.

    python -m tests.support.models.random_model OUT.gguf --preset 0.5b --quantization q8_0

Speed, memory and size match a real model of that shape; its output is noise.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from tests.support.models import quantization, random_vocabulary
from tests.support.models.shape import ImpossibleModelError, Shape, Tensor, add_flags, check, shape_of, tensors
from tokenbus.protocol.telemetry import logs
from tools.demo_model import chats

PRE_TOKENIZER = "qwen2"
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5
_SLAB = 1 << 20
"""Number of weights drawn at a time: 4 MiB."""


def write(
    path: Path, shape: Shape, quantized_to: str = "f16", *, seed: int = 0, threads: int = 1, pooling: str = ""
) -> None:
    """Writes the model, completely or not at all. `threads` are for quantizing; 0 means all cores. A `pooling`, such
    as `last`, is named in the file and makes it a model for embeddings.

    The same arguments give the same bytes, and one seed gives the same weights in every quantization, except for
    rounding. Raises ImpossibleModelError, and OSError if the file can't be written."""
    check(shape)
    quantization.check(shape, quantized_to)
    if seed < 0:
        raise ImpossibleModelError(f"seed must be at least 0, got {seed}")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".random-model-") as folder:
        made = Path(folder, "plain.gguf")
        _write_plain(made, shape, quantized_to if quantized_to in quantization.PLAIN else "f16", seed, pooling)
        if quantized_to not in quantization.PLAIN:
            plain, made = made, Path(folder, "quantized.gguf")
            quantization.quantize(plain, made, shape, quantized_to, threads)
        made.replace(path)


def _write_plain(path: Path, shape: Shape, encoding: str, seed: int, pooling: str) -> None:
    rng = generator(seed)
    file_type, matrix_type = quantization.PLAIN[encoding]
    _write_header(path, shape, file_type, matrix_type, pooling)
    with path.open("ab") as file:
        _pad(file)
        for tensor in tensors(shape):
            kind = _type_of(tensor, matrix_type)
            for weights in slabs(tensor, rng):
                file.write(gguf.quantize(weights, kind).tobytes())
            _pad(file)


def _write_header(
    path: Path, shape: Shape, file_type: int, matrix_type: gguf.GGMLQuantizationType, pooling: str
) -> None:
    """Writes everything before the weights. The GGUF writer could write those too, but only whole tensors, and the
    embedding of the preset 0.5b alone would take 816 MB of memory."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tokenbus random")
    writer.add_file_type(file_type)
    _add_shape(writer, shape)
    if pooling:
        writer.add_pooling_type(gguf.PoolingType[pooling.upper()])
    add_vocabulary(writer, random_vocabulary.build(shape.vocab))
    for tensor in tensors(shape):
        kind = _type_of(tensor, matrix_type)
        _, value_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size * value_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(shape.vocab)


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: random_vocabulary.Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.texts.index(chats.BOS))
    writer.add_eos_token_id(vocabulary.texts.index(chats.END))
    writer.add_add_bos_token(True)
    writer.add_chat_template(chats.CHAT_TEMPLATE)


def _type_of(tensor: Tensor, matrix_type: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    return matrix_type if tensor.is_matrix else gguf.GGMLQuantizationType.F32


def generator(seed: int) -> np.random.Generator:
    """Returns the random generator of a tensor's weights. PCG64 is named since NumPy's default may change."""
    return np.random.Generator(np.random.PCG64(seed))


def slabs(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Yields a tensor's weights row by row, `_SLAB` at a time. A norm's weights are 1."""
    for start in range(0, tensor.size, _SLAB):
        count = min(_SLAB, tensor.size - start)
        if tensor.is_matrix:
            yield rng.standard_normal(count, np.float32) * np.float32(tensor.std)
        else:
            yield np.ones(count, np.float32)


def _pad(file: BinaryIO) -> None:
    """Pads the file to GGUF's alignment, before the first tensor and after each."""
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.models.random_model",
        description="Write a GGUF file with random weights for benchmarks.",
        allow_abbrev=False,
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    add_flags(parser)
    parser.add_argument(
        "--quantization", type=str.lower, default="q8_0", metavar="TYPE", help="a llama.cpp file type (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="for quantizing (%(default)s); 0 takes all")
    return parser


def main() -> None:
    logs.configure("bench")
    options = _parser().parse_args()
    shape = shape_of(options)
    began = time.monotonic()
    try:
        write(options.out, shape, options.quantization, seed=options.seed, threads=options.threads)
    except (ImpossibleModelError, OSError) as error:
        raise SystemExit(f"{options.out}: {error}") from None
    weights, size = sum(tensor.size for tensor in tensors(shape)), options.out.stat().st_size
    took_s = time.monotonic() - began
    print(f"{options.out}: {weights:,} weights, {size:,} bytes, {8 * size / weights:.2f} bits a weight, {took_s:.1f} s")


if __name__ == "__main__":
    main()
