"""A published encoder becomes the GGUF that llama.cpp's own tools would make of it, or says why it can't."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support import safetensors_model
from tests.support.models import random_encoder
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import converted, encoder, process
from tokenbus.worker.files.layouts import SafetensorsLayout

SHAPE = random_encoder.PRESETS["tiny"]
SOURCES = {name: source for source, name in encoder._LAYER}
ENDS = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
KEYS = ("general.name", "general.file_type", "tokenizer.ggml.pre", "bert.vocab_size")
"""What conversions have, and random encoders do not."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(converted.constants, "HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reader(tmp_path: Path) -> gguf.GGUFReader:
    """The model as it is to be."""
    random_encoder.write(tmp_path / "wanted.gguf", SHAPE)
    return gguf.GGUFReader(tmp_path / "wanted.gguf")


@pytest.fixture
def folder(tmp_path: Path, reader: gguf.GGUFReader) -> Path:
    """The same model as it would be published."""
    made = tmp_path / "published"
    (made / "1_Pooling").mkdir(parents=True)
    tensors = {source_name(tensor.name): np.array(tensor.data) for tensor in reader.tensors}
    safetensors_model.write(made / "model.safetensors", tensors | {"pooler.dense.bias": np.zeros(64, np.float32)})
    config = {
        "architectures": ["BertModel"], "hidden_size": SHAPE.width, "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads, "intermediate_size": SHAPE.feed_forward, "vocab_size": SHAPE.vocab,
        "max_position_embeddings": SHAPE.context, "layer_norm_eps": random_encoder.EPSILON, "hidden_act": "gelu",
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer(reader.fields["tokenizer.ggml.tokens"].contents())))
    (made / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return made


def source_name(name: str) -> str:
    start, _, suffix = name.rpartition(".")
    if start in ENDS:
        return f"{ENDS[start]}.{suffix}"
    _, layer, part = start.split(".")
    return f"encoder.layer.{layer}.{SOURCES[part]}.{suffix}"


def tokenizer(texts: list[str]) -> dict[str, Any]:
    words = [text if text.startswith("[") else text[1:] if text.startswith("▁") else f"##{text}" for text in texts]
    return {
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
        "model": {"type": "WordPiece", "vocab": {word: number for number, word in enumerate(words)}},
        "added_tokens": [{"id": number, "content": words[number], "special": True} for number in range(5)],
    }


def convert(folder: Path, kind: str = "f32") -> gguf.GGUFReader:
    files = SafetensorsLayout().find(folder)
    return gguf.GGUFReader(converted.convert(str(folder), files, kind, 1, lambda share: None).weights)


def refusal(folder: Path) -> str:
    """Returns the reason for which a model is not converted, by the code that its process runs."""
    files = SafetensorsLayout().find(folder)
    sidecars = {name: str(path) for name, path in files.sidecars.items()}
    with pytest.raises(ModelError) as raised:
        process.convert(process.Job("tiny", [str(files.weights)], sidecars, "f32", 1, str(folder / "out.gguf")))
    return str(raised.value)


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_an_encoder_has_the_same_tensors_and_metadata_as_the_file_that_it_was_made_from(
    folder: Path, reader: gguf.GGUFReader
) -> None:
    made = convert(folder)
    found, wanted = ({tensor.name: tensor for tensor in one.tensors} for one in (made, reader))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name].data, tensor.data), name
    fields, known = ({key: field.contents() for key, field in one.fields.items()} for one in (made, reader))
    same = [key for key in known if key not in KEYS and not key.startswith("GGUF")]
    assert {key: fields.get(key) for key in same} == {key: known[key] for key in same}


def test_matrices_take_the_type_asked_for_and_positions_stay_exact(folder: Path) -> None:
    kinds = {tensor.name: tensor.tensor_type.name for tensor in convert(folder, "f16").tensors}
    assert {kinds[name] for name in ("token_embd.weight", "blk.1.ffn_up.weight")} == {"F16"}
    exact = ("position_embd.weight", "token_types.weight", "blk.0.attn_q.bias", "token_embd_norm.weight")
    assert {kinds[name] for name in exact} == {"F32"}
    assert {tensor.tensor_type.name for tensor in convert(folder, "q8_0").tensors} == {"Q8_0", "F32"}


@pytest.mark.parametrize(("mode", "pooling"), [("cls_token", 2), ("mean_tokens", 1), ("lasttoken", 3)])
def test_the_pooling_that_is_published_is_that_of_the_file(folder: Path, mode: str, pooling: int) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    assert convert(folder).fields["bert.pooling_type"].contents() == pooling


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_act": "relu"}, "an encoder whose hidden_act is relu is not converted here"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is relative_key is not converted"),
        ({"is_decoder": True}, "an encoder whose is_decoder is True"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_attention_heads": 7}, "7 heads of 64 make no model"),
        ({"num_hidden_layers": 5_000}, "num_hidden_layers must be at most 4,096, got 5,000"),
        ({"num_hidden_layers": 3}, "the tensor encoder.layer.2.attention.self.query.weight is missing"),
        ({"num_hidden_layers": 1}, "16 tensors are unknown here, such as encoder.layer.1"),
        ({"intermediate_size": 129}, "has the shape [128, 64], by its config.json it is [129, 64]"),
        ({"quantization_config": {}}, "an encoder with quantized weights"),
    ],
)
def test_an_encoder_that_would_become_another_one_is_refused(
    folder: Path, fields: dict[str, object], problem: str
) -> None:
    change(folder / "config.json", **fields)
    assert problem in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"normalizer": {"type": "BertNormalizer", "lowercase": False}}, "a vocabulary with capital letters"),
        ({"normalizer": None}, "a vocabulary with capital letters"),
        ({"model": {"type": "BPE", "vocab": {}}}, "a vocabulary of type BPE of an encoder is not converted"),
        ({"model": {"type": "WordPiece", "vocab": [1]}}, "Expected `object`, got `array`"),
        ({"model": {"type": "WordPiece", "vocab": {"[CLS]": 4_000}}}, "is not the vocabulary of 400 words"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 7}}, "added_tokens": []}, "is not the vocabulary of 400 words"),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, "is not the vocabulary of 400 words"),
    ],
)
def test_a_vocabulary_that_llama_cpp_would_read_otherwise_is_refused(
    folder: Path, fields: dict[str, object], problem: str
) -> None:
    change(folder / "tokenizer.json", **fields)
    assert problem in refusal(folder)
    (folder / "tokenizer.json").unlink()
    assert "there is no tokenizer.json beside the weights" in refusal(folder)
