"""The vocabulary of a loaded model: pieces, end tokens, and prompts by llama.cpp's own tokenizer."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes

from llama_cpp import llama_cpp as llama

from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.engine.gguf.metadata import Metadata

_CONTROL = 1 << 3
_UNKNOWN = 1 << 0
_USER_DEFINED = 1 << 4
_BUFFER_BYTES = 256


class GgufTokenizer:
    """Safe to use from several threads: llama.cpp's tokenizer keeps no state."""

    def __init__(self, vocab: llama.llama_vocab_p, metadata: Metadata) -> None:
        self._vocab = vocab
        self.size = llama.llama_vocab_n_tokens(vocab)
        tokens = range(self.size)
        self.end_token_ids = frozenset(token for token in tokens if llama.llama_vocab_is_eog(vocab, token))
        self.token_bytes = self._all_token_bytes()
        attributes = [llama.llama_vocab_get_attr(vocab, token) for token in tokens]
        special = [token for token in tokens if attributes[token] & (_CONTROL | _UNKNOWN)]
        self.rules = self._rules(metadata, special)
        kinds = _CONTROL | _UNKNOWN | _USER_DEFINED
        self.user_defined = {self._text(token): token for token in tokens if attributes[token] & kinds == _USER_DEFINED}
        self._builder = prompt.PromptBuilder(self.rules, self.encode)

    def __repr__(self) -> str:
        return f"<GgufTokenizer of {self.size} tokens>"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a special token."""
        data = text.encode()
        room = len(data) + 8
        while True:
            ids = (llama.llama_token * room)()
            count = llama.llama_tokenize(self._vocab, data, len(data), ids, room, False, False)
            if count >= 0:
                return list(ids[:count])
            room = -count

    @property
    def supports_chat(self) -> bool:
        """Whether there is a template for conversations that can be used."""
        return self._builder.supports_chat

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Raises RequestError."""
        if request.messages is not None:
            return self._builder.from_messages(request.messages, request.chat_template_kwargs)
        if request.text is None:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "text or messages is required", param="text")
        return self._builder.from_text(request.text)

    def _all_token_bytes(self) -> list[bytes]:
        buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        return [self._bytes_of_token(token, buffer) for token in range(self.size)]

    def _bytes_of_token(self, token: int, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        length = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:length]

    def _rules(self, metadata: Metadata, special: list[int]) -> prompt.PromptRules:
        bos, eos = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_eos(self._vocab)
        return prompt.PromptRules(
            special_tokens={self._text(token): token for token in special},
            chat_template=metadata.text("tokenizer.chat_template"),
            bos_token=self._text(bos) if bos >= 0 else "",
            eos_token=self._text(eos) if eos >= 0 else "",
            bos_token_id=bos if bos >= 0 else None,
            add_bos=bool(llama.llama_vocab_get_add_bos(self._vocab)),
            vocab_size=self.size,
        )

    def _text(self, token: int) -> str:
        text: bytes = llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")
