"""Writes a folder with an ONNX model of random weights, of any llama shape, as published models are laid out.

    python -m tests.support.models.random_onnx FOLDER --preset 0.5b [--flavour plain] [--bits 4]

The weights equal those of `random_model` with the same seed, except for rounding, so that engines for the two formats
can be compared on them. The folder has a genai_config.json, so that onnxruntime-genai can load it too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import onnx
from onnx import TensorProto

from tests.support.models import nbits, random_model, random_vocabulary
from tests.support.models.shape import ImpossibleModelError, Shape, add_flags, check, shape_of, tensors
from tokenbus.protocol.telemetry import logs
from tools.demo_model import chats, export_onnx, onnx_graph

BITS = (32, 8, 4)
"""Bits per weight: 32 is F32; 4 and 8 are integers with a scale for each block, in MatMulNBits nodes."""
_WEIGHTS = "model.onnx.data"
_SLAB = 1 << 20
_ALIGNMENT = 4_096
"""Alignment of weights, which onnxruntime maps into memory by pages."""
Array = np.ndarray[Any, np.dtype[Any]]


def write(folder: Path, shape: Shape, flavour: onnx_graph.Flavour = "gqa", *, bits: int = 32, seed: int = 0) -> None:
    """Writes the folder, completely or not at all. The same arguments give the same bytes.

    Raises ImpossibleModelError, and OSError if the folder can't be written or is not empty."""
    check(shape)
    nbits.check(shape, bits)
    if seed < 0:
        raise ImpossibleModelError(f"seed must be at least 0, got {seed}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".random-onnx-") as temporary:
        made = Path(temporary, "made")
        made.mkdir()
        _write_graph(made, _drawn(Path(temporary, "drawn"), shape, seed), _sizes(shape), flavour, bits)
        vocabulary = random_vocabulary.build(shape.vocab)
        tokenizer = export_onnx.tokenizer(vocabulary.texts, vocabulary.merges)
        export_onnx.write_sidecars(made, _sizes(shape), shape.feed_forward, tokenizer)
        (made / "genai_config.json").write_text(json.dumps(_genai(shape, flavour), indent=1) + "\n")
        made.replace(folder)


class Beside:
    """Writes weights into the external data file of a graph, a slab at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __call__(self, name: str, array: Array) -> TensorProto:
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        tensor = TensorProto(name=name, dims=array.shape, data_type=kind, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", _WEIGHTS), ("offset", self._file.tell()), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        rows = max(1, _SLAB * len(array) // array.size)
        for start in range(0, len(array), rows):
            np.ascontiguousarray(array[start : start + rows]).tofile(self._file)
        return tensor


def _drawn(path: Path, shape: Shape, seed: int) -> dict[str, Array]:
    """Draws all weights into a mapped file, since a graph needs them in a different order than they are drawn in."""
    rng = random_model.generator(seed)
    starts = {}
    with path.open("wb") as file:
        for tensor in tensors(shape):
            starts[tensor] = file.tell()
            for weights in random_model.slabs(tensor, rng):
                weights.tofile(file)
    return {tensor.name: np.memmap(path, np.float32, "r", start, tensor.shape) for tensor, start in starts.items()}


def _write_graph(
    folder: Path, drawn: dict[str, Array], sizes: onnx_graph.Shape, flavour: onnx_graph.Flavour, bits: int
) -> None:
    if bits != 32:
        # The output is quantized and the embedding is not, as onnxruntime-genai's builder does it.
        drawn = {"output.weight": drawn["token_embd.weight"]} | drawn
        sizes = sizes._replace(tied=False)
    with (folder / _WEIGHTS).open("wb") as file:
        beside = Beside(file)
        quantized = nbits.Quantized(beside, bits)
        model = onnx_graph.build(sizes, drawn.__getitem__, flavour, beside if bits == 32 else quantized)
        quantized.change(model)
    onnx.save(model, folder / "model.onnx")


def _sizes(shape: Shape) -> onnx_graph.Shape:
    return onnx_graph.Shape(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocab=shape.vocab,
        context=shape.context,
        rope_base=random_model.ROPE_BASE,
        epsilon=random_model.NORM_EPSILON,
        tied=shape.tied,
    )


def _genai(shape: Shape, flavour: onnx_graph.Flavour) -> export_onnx.Json:
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": shape.width // shape.heads,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    if flavour == "plain":
        decoder["inputs"] |= {"position_ids": "position_ids"}  # type: ignore[operator]
    end = chats.SPECIAL_TOKENS.index(chats.END)
    return {
        "model": {
            "type": "llama",
            "bos_token_id": chats.SPECIAL_TOKENS.index(chats.BOS),
            "eos_token_id": end,
            "pad_token_id": end,
            "context_length": shape.context,
            "vocab_size": shape.vocab,
            "decoder": decoder,
        },
        "search": {"do_sample": False, "max_length": shape.context, "past_present_share_buffer": flavour == "gqa"},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.models.random_onnx",
        description="Write an ONNX model with random weights for benchmarks.",
        allow_abbrev=False,
    )
    parser.add_argument("out", type=Path, metavar="FOLDER")
    add_flags(parser)
    parser.add_argument("--flavour", choices=get_args(onnx_graph.Flavour), default="gqa", help="(%(default)s)")
    parser.add_argument("--bits", type=int, choices=BITS, default=32, help="of a weight (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (%(default)s)")
    return parser


def main() -> None:
    logs.configure("bench")
    options = _parser().parse_args()
    shape = shape_of(options)
    began = time.monotonic()
    try:
        write(options.out, shape, options.flavour, bits=options.bits, seed=options.seed)
    except (ImpossibleModelError, OSError) as error:
        raise SystemExit(f"{options.out}: {error}") from None
    weights, size = sum(tensor.size for tensor in tensors(shape)), (options.out / _WEIGHTS).stat().st_size
    print(f"{options.out}: {weights:,} weights, {size:,} bytes, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
