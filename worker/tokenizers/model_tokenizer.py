"""The parts of a tokenizer that do not depend on the format of the model's files: prompts, and a published
`tokenizer.json` in the format of the `tokenizers` library.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import internal
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.regular import MAX_TOKENIZER_BYTES, read_regular


class ModelTokenizer:
    """Makes the token ids of prompts by the model's own rules. Safe to use from several threads."""

    end_token_ids: frozenset[int]
    token_bytes: list[bytes]
    """The bytes of each token's text, by token id; empty for control tokens."""

    def __init__(self, rules: tokenizer_bundle.PromptRules, encode: Callable[[str], list[int]]) -> None:
        self.rules = rules
        self._encode = encode
        self._builder = prompt.PromptBuilder(rules, encode)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.rules.vocab_size} tokens>"

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.rules.vocab_size

    @property
    def supports_chat(self) -> bool:
        """Whether the model has a working chat template."""
        return self._builder.supports_chat

    @property
    def supports_fim(self) -> bool:
        """Whether the vocabulary has the tokens to fill in the middle."""
        return self.rules.fim is not None

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text in which no special token is parsed."""
        return self._encode(text)

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Returns the token ids of a text or a conversation. Raises RequestError."""
        return self._builder.build(request, request.max_tokens)


def read_tokenizer_json(path: Path | None) -> bytes | None:
    """Returns the file's content, or None if there is no file or it can't be read or is too large to be a tokenizer."""
    if path is None:
        return None
    try:
        return read_regular(path, MAX_TOKENIZER_BYTES)
    except ModelError:
        return None


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
