"""The tokenizer of an ONNX model, read from the files next to it: prompts, token bytes, and end tokens.

A decoder turns a list of tokens into text. For the bytes of each token there are two cases: in byte-level vocabularies
each letter of a token is a byte, so the bytes can be read off; for all others the decoder is called, token by token.
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenbus.protocol.prompt import prompt, token_bound, tokenizer_bundle
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.model_config import read_genai, to_token_ids
from tokenbus.worker.files.model_files import read_json
from tokenbus.worker.files.regular import MAX_CONFIG_BYTES, read_regular
from tokenbus.worker.tokenizers import model_tokenizer
from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer

_MAX_TOKENS = 1 << 24
_MIN_COVERAGE = 0.5
"""The share of a model's vocabulary that its tokenizer must cover: exports pad the vocabulary, but no further."""

_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The tokens before the text, after it, and before the generated part, as models name them."""


class _Token(msgspec.Struct, frozen=True):
    content: str


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    """The fields of `tokenizer_config.json` and `special_tokens_map.json` that matter here."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_Template] | None = None


class OnnxTokenizer(ModelTokenizer):
    """`sidecars` are the files next to the model; `vocab_size` is the number of its logits, None without logits.

    Thread-safe. Raises ModelError if files are missing, malformed, or belong to another model."""

    def __init__(self, sidecars: dict[str, Path], vocab_size: int | None, where: str) -> None:
        document = model_tokenizer.read_tokenizer_json(sidecars.get("tokenizer.json"))
        plain = model_tokenizer.without_special_tokens(document) if document is not None else None
        if document is None or plain is None:
            raise ModelError(f"{where}: has no tokenizer.json beside it that can be read; fetch it with the model")
        try:
            self._full = Tokenizer.from_buffer(document)
            self._plain = Tokenizer.from_str(plain)
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{sidecars['tokenizer.json']}: is not a tokenizer ({error}); fetch it again") from error
        self._full.no_truncation()
        self._full.no_padding()
        size = self._checked_size(vocab_size, where)
        super().__init__(self._read_rules(sidecars, size), prompt.load_encoder(plain))
        eos = self._full.token_to_id(self.rules.eos_token) if self.rules.eos_token else None
        self.end_token_ids = to_token_ids(read_genai(sidecars).eos_token_id) | to_token_ids(eos)
        self.token_bytes = bytes_of_tokens(self._full, document, size)
        self.bundle = tokenizer_bundle.pack(tokenizer_bundle.TokenizerBundle(tokenizer_json=plain, rules=self.rules))

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Returns the ids of a text with the tokens that the model's tokenizer adds around it, as embeddings require.

        No special token is parsed in the text itself."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return self._builder.with_bos(self._full.post_process(encoding).ids)

    def _checked_size(self, vocab_size: int | None, where: str) -> int:
        known = max(self._full.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if known > _MAX_TOKENS:
            raise ModelError(f"{where}: its tokenizer.json has a token of number {known - 1:,}; fetch it again")
        if vocab_size is None:
            return known
        if known > vocab_size or known < _MIN_COVERAGE * vocab_size:
            raise ModelError(
                f"{where}: its tokenizer.json has {known} tokens, its logits {vocab_size}: they belong to two "
                "models; fetch both from one place"
            )
        return vocab_size

    def _read_rules(self, sidecars: dict[str, Path], size: int) -> tokenizer_bundle.PromptRules:
        config = read_json(sidecars.get("tokenizer_config.json"), _TokenizerConfig)
        more = read_json(sidecars.get("special_tokens_map.json"), _TokenizerConfig)
        bos, eos = _text(config.bos_token or more.bos_token), _text(config.eos_token or more.eos_token)
        bos_id = self._full.token_to_id(bos) if bos else None
        add_bos = config.add_bos_token
        if add_bos is None:  # older files don't say, but a trial shows
            add_bos = bos_id is not None and self._full.encode("a").ids[:1] == [bos_id]
        return tokenizer_bundle.PromptRules(
            special_tokens={
                token.content: number
                for number, token in self._full.get_added_tokens_decoder().items()
                if token.special
            },
            chat_template=_template(sidecars.get("chat_template.jinja"), config),
            bos_token=bos,
            eos_token=eos,
            bos_token_id=bos_id,
            add_bos=add_bos,
            vocab_size=size,
            fim=self._fim_tokens(),
        )

    def _fim_tokens(self) -> tokenizer_bundle.FimTokens | None:
        for names in _FIM_TOKENS:
            prefix, suffix, middle = map(self._full.token_to_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                return tokenizer_bundle.FimTokens(prefix=prefix, suffix=suffix, middle=middle)
        return None


def _template(path: Path | None, config: _TokenizerConfig) -> str | None:
    """Returns the template in its own file, or else the one in the configuration."""
    if path is not None:
        with contextlib.suppress(UnicodeDecodeError):
            return str(read_regular(path, MAX_CONFIG_BYTES), "utf-8")
    match config.chat_template:
        case list() as several:
            return {one.name: one.template for one in several}.get("default")
        case template:
            return template


def _text(token: str | _Token | None) -> str:
    return token.content if isinstance(token, _Token) else token or ""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF_LETTER = token_bound.byte_letters()


def bytes_of_tokens(tokenizer: Tokenizer, document: bytes, size: int) -> list[bytes]:
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
