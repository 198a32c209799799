"""llama.cpp's own tokenizer for a model, and a reranker's inputs from a query and documents.

A file may have a template for these, in which `{query}` and `{document}` stand for the texts. Unlike in llama.cpp's
server, special tokens are parsed only in the template, never in a user's text.
"""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from typing import NamedTuple

from llama_cpp import llama_cpp as llama

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import errors
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.tokenizers import pre_tokenizers
from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer

QUERY, DOCUMENT = "{query}", "{document}"
_PLACEHOLDER = re.compile(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})")


class PairTokens(NamedTuple):
    """The tokens around two texts, for a model without a template."""

    before: list[int]
    between: list[int]
    after: list[int]


class RerankPrompt:
    """The form of a model's inputs. Safe to use from several threads."""

    def __init__(self, runs: list[int | list[str]], encode: Callable[[str], list[int]]) -> None:
        """`runs` are tokens, and texts to be encoded together, in parts: template text or a placeholder."""
        self._runs = runs
        self._encode = encode

    def __repr__(self) -> str:
        return f"<RerankPrompt of {len(self._runs)} runs>"

    @classmethod
    def from_template(
        cls, template: str, special_tokens: Mapping[str, int], encode: Callable[[str], list[int]]
    ) -> RerankPrompt:
        return cls(list(_runs_of(template, special_tokens)), encode)

    @classmethod
    def from_tokens(cls, tokens: PairTokens, encode: Callable[[str], list[int]]) -> RerankPrompt:
        return cls([*tokens.before, [QUERY], *tokens.between, [DOCUMENT], *tokens.after], encode)

    def make(self, query: str, documents: Listing[str]) -> list[list[int]]:
        """Returns the token ids for each document."""
        known: dict[str, list[int]] = {}
        """Texts without a document, encoded once for all documents."""
        return [self._make({QUERY: query, DOCUMENT: document}, known) for document in documents]

    def _make(self, texts: Mapping[str, str], known: dict[str, list[int]]) -> list[int]:
        ids: list[int] = []
        for run in self._runs:
            if isinstance(run, int):
                ids.append(run)
                continue
            text = "".join(texts.get(part, part) for part in run)
            if DOCUMENT in run:
                ids += self._encode(text)
            else:
                ids += known.get(text) or known.setdefault(text, self._encode(text))
        return ids


def _runs_of(template: str, special_tokens: Mapping[str, int]) -> Iterator[int | list[str]]:
    longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
    special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or r'(?!)'})")
    run: list[str] = []
    for part in _PLACEHOLDER.split(template):
        for piece in [part] if part in (QUERY, DOCUMENT) else special.split(part):
            if piece not in special_tokens:
                run += [piece] if piece else []
                continue
            if run:
                yield run
            yield special_tokens[piece]
            run = []
    if run:
        yield run


_MAX_RECURSION = 8_192
"""The most characters that llama.cpp may be given to match with `std::regex`."""
_RUNS = re.compile(r"[^\n]+"), re.compile(r"[\W_]+")
"""Texts that a pattern may match as a whole: no known one goes from a letter to the next line."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
"""Bits of llama.cpp's token attributes."""
_BUFFER_BYTES = 256


class GgufTokenizer(ModelTokenizer):
    """Thread-safe: llama.cpp's tokenizer keeps no state."""

    def __init__(self, vocab: llama.llama_vocab_p, metadata: Metadata) -> None:
        self._vocab = vocab
        tokens = range(llama.llama_vocab_n_tokens(vocab))
        buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        self.end_token_ids = frozenset(token for token in tokens if llama.llama_vocab_is_eog(vocab, token))
        self.token_bytes = [self._bytes_of_token(token, buffer) for token in tokens]
        attributes = [llama.llama_vocab_get_attr(vocab, token) for token in tokens]
        special = [token for token in tokens if attributes[token] & (_CONTROL | _UNKNOWN)]
        kinds = _CONTROL | _UNKNOWN | _USER_DEFINED
        self.user_defined = {self._text(token): token for token in tokens if attributes[token] & kinds == _USER_DEFINED}
        """The tokens that are matched first in every text."""
        super().__init__(self._rules(metadata, special, len(tokens)), self.encode)
        self.recurses = metadata.text("tokenizer.ggml.model") == "gpt2" and pre_tokenizers.recurses(
            metadata.text("tokenizer.ggml.pre") or "default"
        )
        """Whether llama.cpp overflows the stack with some long texts."""
        self._agreeing: bytes | None = None

    def encode_long_with(self, bundle: bytes | None) -> None:
        """Takes a tokenizer that agrees with llama.cpp's, for the texts that are too long for that."""
        self._agreeing = bundle

    @functools.cached_property
    def _encode_long(self) -> prompt.Encode:
        """Loaded when it is needed first, since most engines never get such a text."""
        assert self._agreeing is not None
        return prompt.load_encoder(tokenizer_bundle.unpack(self._agreeing).tokenizer_json)

    @property
    def pair_tokens(self) -> PairTokens:
        """The tokens around and between a query and a document, as in llama.cpp's server."""
        bos, sep = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_sep(self._vocab)
        eos = llama.llama_vocab_eos(self._vocab)
        end = [eos if eos >= 0 else sep] if llama.llama_vocab_get_add_eos(self._vocab) else []
        return PairTokens(
            before=[bos] if llama.llama_vocab_get_add_bos(self._vocab) else [],
            between=[*end, *([sep] if llama.llama_vocab_get_add_sep(self._vocab) else [])],
            after=end,
        )

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text in which no special token is parsed."""
        return self._tokenize(text, adds_special=False)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Returns the ids of a text with the tokens that the model expects around it, as embeddings require.

        No special token is parsed in the text itself."""
        return self._tokenize(text, adds_special=True)

    def _tokenize(self, text: str, *, adds_special: bool) -> list[int]:
        if self.recurses and len(text) > _MAX_RECURSION:
            if self._agreeing is not None:
                ids_of_text = self._encode_long(text)
                return self._with_special(ids_of_text) if adds_special else ids_of_text
            if any(len(found[0]) > _MAX_RECURSION for run in _RUNS for found in run.finditer(text)):
                problem = f"the model's tokenizer can't take a line of more than {_MAX_RECURSION:,} characters"
                raise errors.request_error(errors.Code.UNSUPPORTED, problem)
        data = text.encode()
        room = len(data) + 8  # enough for most texts, since a token is rarely shorter than a byte
        while True:
            ids = (llama.llama_token * room)()
            count = llama.llama_tokenize(self._vocab, data, len(data), ids, room, adds_special, False)
            if count >= 0:
                return list(ids[:count])
            room = -count  # a negative count is the number of ids needed

    def _with_special(self, ids: list[int]) -> list[int]:
        """Returns the ids with those that llama.cpp puts around them in such a vocabulary."""
        bos = [llama.llama_vocab_bos(self._vocab)] if llama.llama_vocab_get_add_bos(self._vocab) else []
        eos = [llama.llama_vocab_eos(self._vocab)] if llama.llama_vocab_get_add_eos(self._vocab) else []
        return [*bos, *ids, *eos]

    def _bytes_of_token(self, token: int, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        length = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        if length < 0:  # llama.cpp reports that the buffer is too small
            buffer = ctypes.create_string_buffer(-length)
            length = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:length]

    def _rules(self, metadata: Metadata, special: list[int], size: int) -> tokenizer_bundle.PromptRules:
        bos, eos = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_eos(self._vocab)
        return tokenizer_bundle.PromptRules(
            special_tokens={self._text(token): token for token in special},
            chat_template=metadata.text("tokenizer.chat_template"),
            bos_token=self._text(bos) if bos >= 0 else "",
            eos_token=self._text(eos) if eos >= 0 else "",
            bos_token_id=bos if bos >= 0 else None,
            add_bos=bool(llama.llama_vocab_get_add_bos(self._vocab)),
            vocab_size=size,
            fim=self._fim_tokens(),
        )

    def _fim_tokens(self) -> tokenizer_bundle.FimTokens | None:
        """Returns the tokens named in the file (`tokenizer.ggml.fim_*`), or known to llama.cpp by their texts."""
        prefix, suffix = llama.llama_vocab_fim_pre(self._vocab), llama.llama_vocab_fim_suf(self._vocab)
        middle = llama.llama_vocab_fim_mid(self._vocab)
        if min(prefix, suffix, middle) < 0:
            return None
        return tokenizer_bundle.FimTokens(prefix=prefix, suffix=suffix, middle=middle)

    def _text(self, token: int) -> str:
        text: bytes = llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")
