"""The one declaration of the sizes in `config.json`, which Hugging Face transformers writes next to a model.

Conversion, the ONNX engine and the memory estimate before loading all read them here."""

from pathlib import Path
from typing import TypeVar

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError

_WIDE = ("float32", "torch.float32")


class ModelSizes(msgspec.Struct, frozen=True):
    """The sizes of a model; 0 and None for those that the file does not say."""

    architectures: list[str] = []
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    n_positions: int = 0
    sliding_window: int | None = None
    use_sliding_window: bool = True
    dtype: str = ""
    torch_dtype: str = ""
    """The older name of `dtype`."""

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)

    @property
    def trained_context(self) -> int:
        """The context length for which the model was trained."""
        return self.max_position_embeddings or self.n_positions

    @property
    def window(self) -> int | None:
        """The most tokens that a token attends to; None for all."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def weight_bits(self) -> float:
        """The bits per weight as published."""
        return 32.0 if (self.dtype or self.torch_dtype) in _WIDE else 16.0


SizesT = TypeVar("SizesT", bound=ModelSizes)


def read(path: Path | None, kind: type[SizesT]) -> SizesT:
    """Returns the defaults if there is no file. A null field counts as missing, as it does for transformers. Raises
    ModelError naming a file that is malformed."""
    if path is None:
        return kind()
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        if isinstance(text := fields.get("text_config"), dict):  # of a model that also reads images
            fields |= {name: one for name, one in text.items() if one is not None and name != "architectures"}
        return msgspec.convert({name: one for name, one in fields.items() if one is not None}, kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; correct or remove it") from error
