"""The demo model as it would be published in safetensors, and files of safetensors with any header."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tokenbus.demo import MODEL_PATH, ONNX_PATH

Array = npt.NDArray[Any]
SOURCES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = ("attn_q.weight", "attn_k.weight")
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
HEAD_SIZE = 32


def write_demo(folder: Path, *, shards: int = 1) -> Path:
    """Writes the demo model's weights as they are in its GGUF, bit by bit, with the files of its tokenizer."""
    tensors = demo_tensors()
    folder.mkdir(parents=True)
    for path in ONNX_PATH.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    names = sorted(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        name = "model.safetensors" if shards == 1 else f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write(folder / name, part)
    return folder


def write_bf16(folder: Path, *, spoiled: float | None = None) -> None:
    """Rewrites the weights of the demo model's folder in BF16, one of them perhaps as a number that F16 can't hold."""
    floats = {name: data.astype(np.float32) for name, data in demo_tensors().items()}
    if spoiled is not None:
        floats["model.embed_tokens.weight"][-1, -1] = spoiled
    brains = {name: (data.view(np.uint32) >> 16).astype(np.uint16) for name, data in floats.items()}
    write(folder / "model.safetensors", brains)


def demo_tensors() -> dict[str, Array]:
    """Returns the demo model's tensors by the names of transformers."""
    found = {}
    for tensor in gguf.GGUFReader(MODEL_PATH).tensors:
        data = np.array(tensor.data)
        if tensor.name.endswith(_ROTATED):
            data = data.reshape(-1, HEAD_SIZE // 2, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        found[source_name(tensor.name)] = data
    return found


def source_name(name: str) -> str:
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{SOURCES[kind]}.{suffix}"


def header_of(tensors: Mapping[str, Array]) -> dict[str, Any]:
    at, header = 0, {}
    for name, data in tensors.items():
        offsets = [at, at + data.nbytes]
        header[name] = {"dtype": _DTYPES[data.dtype.name], "shape": list(data.shape), "data_offsets": offsets}
        at += data.nbytes
    return header


def write(path: Path, tensors: Mapping[str, Array], header: Mapping[str, Any] | None = None) -> None:
    """Writes a file of safetensors, with another header than the right one if there is one."""
    text = json.dumps(header_of(tensors) if header is None else header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data.tobytes() for data in tensors.values()))


def set_config(folder: Path, **fields: object) -> None:
    """Changes fields of a folder's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
