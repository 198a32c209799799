"""Tokenizers as models come with them, in the JSON format of the `tokenizers` library."""

from pathlib import Path
from typing import Any

import msgspec

_MAX_BYTES = 64 * 1024 * 1024


def read(path: Path | None) -> bytes | None:
    """The file, unless there is none or it is too large to be one."""
    return path.read_bytes() if path is not None and path.stat().st_size <= _MAX_BYTES else None


def without_special_tokens(published: bytes) -> str | None:
    """A published tokenizer as routers use it: nothing in a text is a special token, and nothing is put around it.

    None for what is no such file."""
    try:
        document = msgspec.json.decode(published, type=dict[str, Any])
        added = [token for token in document.get("added_tokens") or [] if not token["special"]]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    bare = {"truncation": None, "padding": None, "post_processor": None, "added_tokens": added}
    return msgspec.json.encode(document | bare).decode()
