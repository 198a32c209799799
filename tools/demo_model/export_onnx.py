"""Writes the demo model as ONNX: the GGUF's weights in F32, and its tokenizer's files.

    python -m tools.demo_model.export_onnx [--flavour gqa] [--out FOLDER]

The folder has the layout of published models. It needs gguf and onnx.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx

from tokenbus.demo import MODEL_PATH, ONNX_PATH
from tools.demo_model import chats, onnx_graph

Json = dict[str, Any]


def export(folder: Path, flavour: onnx_graph.Flavour) -> None:
    """Writes the graph and all files beside it."""
    reader = gguf.GGUFReader(MODEL_PATH)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    shape = _shape(reader)
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    model = onnx_graph.build(shape, lambda name: tensors[name].astype(np.float32), flavour)
    onnx.save(model, folder / "onnx" / "model.onnx")
    texts, merges = (reader.fields[f"tokenizer.ggml.{part}"].contents() for part in ("tokens", "merges"))
    write_sidecars(folder, shape, _number(reader, "feed_forward_length"), tokenizer(texts, merges))


def write_sidecars(folder: Path, shape: onnx_graph.Shape, feed_forward: int, tokenizer: Json) -> None:
    """Writes the files that accompany a graph and say how the model is to be used, as in published models."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.width,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context, "rms_norm_eps": shape.epsilon, "rope_theta": shape.rope_base,
        "intermediate_size": feed_forward, "tie_word_embeddings": shape.tied,
        "bos_token_id": chats.SPECIAL_TOKENS.index(chats.BOS),
        "eos_token_id": chats.SPECIAL_TOKENS.index(chats.END),
    }  # fmt: skip
    names = {"bos_token": chats.BOS, "eos_token": chats.END}
    documents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
        "special_tokens_map.json": names,
        "tokenizer_config.json": names | {"add_bos_token": True, "model_max_length": shape.context},
        "tokenizer.json": tokenizer,
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(chats.CHAT_TEMPLATE)


def tokenizer(texts: list[str], merges: list[str]) -> Json:
    """Returns a GGUF vocabulary in the format of the `tokenizers` library. The special tokens come first."""
    special = len(chats.SPECIAL_TOKENS)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    cut = {
        "type": "Split",
        "pattern": {"Regex": chats.PRE_TOKENIZER_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": n, "content": text} | plain for n, text in enumerate(texts[:special])],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, letters]},
        "post_processor": None,
        "decoder": letters,
        "model": {"type": "BPE", "vocab": {text: n for n, text in enumerate(texts)}, "merges": merges},
    }  # fmt: skip


def _number(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[f"llama.{key}"].contents()


def _shape(reader: gguf.GGUFReader) -> onnx_graph.Shape:
    return onnx_graph.Shape(
        layers=_number(reader, "block_count"),
        width=_number(reader, "embedding_length"),
        heads=_number(reader, "attention.head_count"),
        kv_heads=_number(reader, "attention.head_count_kv"),
        vocab=_number(reader, "vocab_size"),
        context=_number(reader, "context_length"),
        rope_base=_number(reader, "rope.freq_base"),
        epsilon=_number(reader, "attention.layer_norm_rms_epsilon"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model as ONNX.")
    parser.add_argument("--flavour", choices=("plain", "gqa"), default="plain")
    parser.add_argument("--out", type=Path, default=ONNX_PATH)
    options = parser.parse_args()
    export(options.out, options.flavour)
    print(f"{options.out}: {(options.out / 'onnx' / 'model.onnx').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
