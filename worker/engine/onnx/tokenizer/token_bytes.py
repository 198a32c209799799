"""The bytes of each token's text, as the decoder of a published tokenizer would write them one after another."""

import re
from typing import Any

import msgspec
from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def from_tokenizer(tokenizer: Tokenizer, document: bytes, size: int) -> list[bytes]:
    """By token id, `size` of them; empty for special tokens, and for ids that stand for nothing."""
    found = [b""] * size
    is_of_bytes = _is_byte_level(msgspec.json.decode(document))
    write = _byte_level if is_of_bytes else _WithDecoder(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id not in added:
            found[token_id] = write(text, token_id)
    for token_id, token in added.items():
        if not token.special:  # among bytes written as letters it is written as it is
            found[token_id] = token.content.encode() if is_of_bytes else write(token.content, token_id)
    return found


def _is_byte_level(document: dict[str, Any]) -> bool:
    """Whether the texts of tokens are bytes written as letters."""
    decoder = document.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (decoder, *decoder.get("decoders", ())))


def _byte_letters() -> dict[str, int]:
    """GPT-2's way of writing bytes: those that can be shown stand for themselves, the others for what follows 255."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _byte_letters()


def _byte_level(text: str, token_id: int) -> bytes:
    if all(letter in _BYTE_OF_LETTER for letter in text):
        return bytes(_BYTE_OF_LETTER[letter] for letter in text)
    return text.encode()


class _WithDecoder:
    """What a token adds to a text that is there already: decoders may do something else at a text's beginning."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()  # of which the special ones are no text
        plain = {token_id for text, token_id in vocabulary.items() if text.isascii() and text.isalpha()}
        self._before = min(plain - added.keys(), default=0)
        self._length = len(tokenizer.decode([self._before]))

    def __call__(self, text: str, token_id: int) -> bytes:
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        decoded: str = self._tokenizer.decode([self._before, token_id])
        return decoded[self._length :].encode()
