"""Encoders of the class `BertModel`, which make embeddings: sizes, tensors and vocabulary, as llama.cpp wants them."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert.architectures import PlannedTensor
from tokenbus.worker.convert.config import CONVERTER, refused
from tokenbus.worker.convert.safetensors import Tensor
from tokenbus.worker.convert.vocabulary import CONTROL, NORMAL
from tokenbus.worker.files import model_config
from tokenbus.worker.files.model_config import Size
from tokenbus.worker.files.regular import MAX_TOKENIZER_BYTES, read_regular

NAME = "bert"
"""llama.cpp's name for the architecture."""
_CLASS = "BertModel"
_PREFIX = "bert."
_BESIDE = ("pooler.", "cls.")
"""Prefixes of tensors that no embedding needs."""
_START, _REST = "▁", "##"
SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
_LAYER = (
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
)
_MAX_LAYERS = 4_096


class EncoderConfig(model_config.ModelSizes, frozen=True):
    """The fields of `config.json` from which an encoder is converted."""

    intermediate_size: Size = 0
    type_vocab_size: Size = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    quantization_config: dict[str, Any] | None = None


class Words(NamedTuple):
    """A WordPiece vocabulary as GGUF has it: words begin with "▁", and the rest of a word does not."""

    texts: list[str]
    types: list[int]


def is_one(path: Path | None) -> bool:
    """Whether a configuration is that of an encoder of this class. Raises ModelError for one that can't be read."""
    return _CLASS in model_config.read_sizes(path, model_config.ModelSizes).architectures


def read_config(path: Path) -> EncoderConfig:
    """Raises ModelError for an encoder whose conversion would be impossible or inexact."""
    config = model_config.read_sizes(path, EncoderConfig)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    for name in (*sizes, "intermediate_size", "type_vocab_size"):
        if getattr(config, name) < 1:
            raise ModelError(f"{path}: {name} must be at least 1, got {getattr(config, name)}; correct it")
    if config.num_hidden_layers > _MAX_LAYERS:
        raise ModelError(
            f"{path}: num_hidden_layers must be at most {_MAX_LAYERS:,}, got {config.num_hidden_layers:,}; correct it"
        )
    if config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"{path}: {config.num_attention_heads} heads of {config.hidden_size} make no model; correct it"
        )
    if config.quantization_config is not None:
        raise refused(path, "an encoder with quantized weights")
    for name, wanted in (("hidden_act", "gelu"), ("position_embedding_type", "absolute"), ("is_decoder", False)):
        if getattr(config, name) != wanted:
            raise refused(path, f"an encoder whose {name} is {getattr(config, name)}")
    return config


def plan(config: EncoderConfig, tensors: dict[str, Tensor], where: Path) -> list[PlannedTensor]:
    """Returns the tensors to write. Raises ModelError if some are missing, unknown, or of another shape."""
    left = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    left = {name: tensor for name, tensor in left.items() if not name.startswith(_BESIDE)}
    planned = []
    for source, name, shape in _expected(config):
        tensor = left.pop(source, None)
        if tensor is None:
            raise ModelError(f"{where}: the tensor {source} is missing; fetch the whole repository")
        if tensor.shape != shape:
            shapes = f"{source} has the shape {list(tensor.shape)}, by its config.json it is {list(shape)}"
            raise ModelError(f"{where}: {shapes}: they are of two models; fetch both from one place")
        planned.append(PlannedTensor(name, shape, (tensor,)))
    if left:
        raise ModelError(f"{where}: {len(left)} tensors are unknown here, such as {min(left)}; use {CONVERTER}")
    return planned


def _expected(config: EncoderConfig) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns the source, the name and the shape of each tensor."""
    width, inner = config.hidden_size, config.intermediate_size
    found: list[tuple[str, str, tuple[int, ...]]] = [
        ("embeddings.word_embeddings.weight", "token_embd.weight", (config.vocab_size, width)),
        ("embeddings.position_embeddings.weight", "position_embd.weight", (config.max_position_embeddings, width)),
        ("embeddings.token_type_embeddings.weight", "token_types.weight", (config.type_vocab_size, width)),
        ("embeddings.LayerNorm.weight", "token_embd_norm.weight", (width,)),
        ("embeddings.LayerNorm.bias", "token_embd_norm.bias", (width,)),
    ]
    for layer in range(config.num_hidden_layers):
        for source, name in _LAYER:
            rows = inner if name == "ffn_up" else width
            columns = () if name.endswith("norm") else (inner if name == "ffn_down" else width,)
            start = f"encoder.layer.{layer}.{source}", f"blk.{layer}.{name}"
            found.append((f"{start[0]}.weight", f"{start[1]}.weight", (rows, *columns)))
            found.append((f"{start[0]}.bias", f"{start[1]}.bias", (rows,)))
    return found


class _Normalizer(msgspec.Struct, frozen=True):
    type: str = ""
    lowercase: bool | None = False
    strip_accents: bool | None = None
    handle_chinese_chars: bool | None = True


class _Model(msgspec.Struct, frozen=True):
    type: str | None = None
    vocab: Any = None
    continuing_subword_prefix: str = _REST


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Document(msgspec.Struct, frozen=True):
    """The fields of `tokenizer.json` that matter here."""

    normalizer: _Normalizer | None = None
    model: _Model = _Model()
    added_tokens: list[_Added] = []


def read_words(path: Path | None, size: int, where: Path) -> Words:
    """Returns a vocabulary of `size` words. Raises ModelError if there is none that llama.cpp supports."""
    if path is None:
        raise ModelError(f"{where}: there is no tokenizer.json beside the weights; fetch the whole repository")
    try:
        document = msgspec.json.decode(read_regular(path, MAX_TOKENIZER_BYTES), type=_Document)
        known = msgspec.convert(document.model.vocab, dict[str, int])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; fetch it again") from error
    cuts = document.normalizer or _Normalizer()
    if document.model.type != "WordPiece" or document.model.continuing_subword_prefix != _REST:
        raise refused(path, f"a vocabulary of type {document.model.type} of an encoder")
    if cuts.type != "BertNormalizer" or not cuts.lowercase or cuts.strip_accents is False:
        raise refused(path, "a vocabulary with capital letters or accents of an encoder")
    added = {one.content: one.id for one in document.added_tokens}
    numbers = [*known.values(), *added.values()]
    if not numbers or min(numbers) < 0 or max(numbers) >= size or any(text not in known | added for text in SPECIAL):
        raise ModelError(
            f"{path}: is not the vocabulary of {size:,} words that its model has; fetch both from one place"
        )
    texts, types = [f"[PAD{number}]" for number in range(size)], [NORMAL] * size
    for text, number in (known | added).items():
        texts[number] = _as_in_gguf(text)
    for one in document.added_tokens:
        types[one.id] = CONTROL if one.special else NORMAL
    return Words(texts, types)


def _as_in_gguf(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[len(_REST) :] if text.startswith(_REST) else _START + text
