"""A tiny encoder in the folder layout of sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "fox", "owl", "sleep", "##s", "run"]
WIDTH = 6


def table() -> np.ndarray:
    """Returns the state of each word, which no other token changes, so tests can compute poolings by hand."""
    rng = np.random.Generator(np.random.PCG64(3))
    return rng.standard_normal((len(WORDS), WIDTH)).astype(np.float32)


def write(folder: Path, *, pooling: str | None = None, output: str = "last_hidden_state") -> None:
    """Writes the encoder. Its configuration says `pooling`: `cls`, `mean`, `last`, or nothing."""
    rows = ["batch", "sequence"]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, rows)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [*rows, WIDTH])]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["states"]),
        helper.make_node("Add", ["attention_mask", "token_type_ids"], ["used"]),
        helper.make_node("Unsqueeze", ["used", "axis"], ["shown"]),
        helper.make_node("Cast", ["shown"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["states", "weights"], [output]),
    ]
    weights = [numpy_helper.from_array(table(), "words"), numpy_helper.from_array(np.array([2]), "axis")]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, weights)
    folder.mkdir(exist_ok=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 16, "hidden_size": WIDTH}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    if pooling is not None:
        said = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({said[pooling]: True, "word_embedding_dimension": 6})
        )


def _tokenizer() -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    special = {text: {"id": text, "ids": [WORDS.index(text)], "tokens": [text]} for text in ("[CLS]", "[SEP]")}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "[PAD]",
        },
        "added_tokens": [{"id": number, "content": text} | plain for number, text in enumerate(WORDS[:4])],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "TemplateProcessing", "single": ends, "pair": ends, "special_tokens": special},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {word: number for number, word in enumerate(WORDS)},
        },
    }  # fmt: skip
