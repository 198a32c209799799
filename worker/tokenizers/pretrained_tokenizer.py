"""Reads the `tokenizer.json` published with a model, in the format of the `tokenizers` library."""

from pathlib import Path
from typing import Any

import msgspec

_MAX_BYTES = 64 * 1024 * 1024


def read(path: Path | None) -> bytes | None:
    """Returns the file's content, or None if there is no file or it is too large to be a tokenizer."""
    return path.read_bytes() if path is not None and path.stat().st_size <= _MAX_BYTES else None


def without_special_tokens(tokenizer_json: bytes) -> str | None:
    """Returns the tokenizer as routers use it: it parses no special tokens and adds none around a text.

    Returns None if the content is not a tokenizer."""
    try:
        document = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
        added = [token for token in document.get("added_tokens") or [] if not token["special"]]
        model = _with_ids(document.get("model"), added)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    plain = {"truncation": None, "padding": None, "post_processor": None, "added_tokens": added, "model": model}
    return msgspec.json.encode(document | plain).decode()


def _with_ids(model: Any, added: list[dict[str, Any]]) -> Any:
    """Returns the model with the added tokens in its vocabulary.

    The library renumbers those that it does not find there from the vocabulary's end on, ignoring their ids."""
    match model:
        case {"vocab": dict(vocab)}:
            ids = {token["content"]: token["id"] for token in added}
            return model | {"vocab": vocab | ids}
    return model
