"""Computes the bytes of text that each token of a `tokenizer.json` stands for.

A decoder turns a list of tokens into text. There are two cases: in byte-level vocabularies each letter of a token is a
byte, so the bytes can be read off; for all others the decoder itself is called, token by token."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenbus.protocol.prompt import token_bound

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF_LETTER = token_bound.byte_letters()


def from_tokenizer(tokenizer: Tokenizer, document: bytes, size: int) -> list[bytes]:
    """Returns `size` entries by token id; those of special tokens and unused ids are empty."""
    found = [b""] * size
    is_byte_level = _is_byte_level(msgspec.json.decode(document))
    to_bytes = _from_letters if is_byte_level else _by_decoder(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id not in added:
            found[token_id] = to_bytes(text, token_id)
    for token_id, token in added.items():
        if not token.special:  # an added token of a byte-level vocabulary is plain text
            found[token_id] = token.content.encode() if is_byte_level else to_bytes(token.content, token_id)
    return found


def _is_byte_level(document: dict[str, Any]) -> bool:
    """Whether the texts of tokens are bytes written as letters."""
    decoder = document.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (decoder, *decoder.get("decoders", ())))


def _from_letters(text: str, token_id: int) -> bytes:
    if all(letter in _BYTE_OF_LETTER for letter in text):
        return bytes(_BYTE_OF_LETTER[letter] for letter in text)
    return text.encode()


def _by_decoder(tokenizer: Tokenizer) -> Callable[[str, int], bytes]:
    """Returns a function that decodes a token after another one, whose text it strips.

    At the beginning of a text, decoders may behave differently, such as dropping a space."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    words = {token_id for text, token_id in vocabulary.items() if text.isascii() and text.isalpha()}
    before = min(words - added.keys(), default=0)  # special added tokens have no text
    length = len(tokenizer.decode([before]))

    def to_bytes(text: str, token_id: int) -> bytes:
        if byte := _BYTE_TOKEN.fullmatch(text):  # part of a character, which the decoder would replace
            return bytes([int(byte[1], 16)])
        decoded: str = tokenizer.decode([before, token_id])
        return decoded[length:].encode()

    return to_bytes
