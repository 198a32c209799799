"""The vocabulary of an ONNX model, from the files that lie beside it: pieces, end tokens, prompts and their rules."""

import contextlib
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.engine.models import generation_config, pretrained_tokenizer
from tokenbus.worker.engine.onnx import genai_config
from tokenbus.worker.engine.onnx.tokenizer import token_bytes
from tokenbus.worker.engine.runner import ModelError

_SMALLEST_SHARE = 0.5
"""Of a model's vocabulary that its tokenizer must cover: exports pad the vocabulary, but not by so much."""


class _Token(msgspec.Struct, frozen=True):
    content: str


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Names(msgspec.Struct, frozen=True):
    """The fields of `tokenizer_config.json` and `special_tokens_map.json` that have a meaning here."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_Template] | None = None


class OnnxTokenizer:
    """Safe to use from several threads. `sidecars` are the files beside the model; `size` is that of its logits, None
    for a model that has none. Raises ModelError for files that are missing, malformed or of another model."""

    def __init__(self, sidecars: dict[str, Path], size: int | None, where: str) -> None:
        document = pretrained_tokenizer.read(sidecars.get("tokenizer.json"))
        bare = pretrained_tokenizer.without_special_tokens(document) if document is not None else None
        if document is None or bare is None:
            raise ModelError(f"{where}: has no tokenizer.json beside it that can be read; fetch it with the model")
        try:
            self._whole = Tokenizer.from_buffer(document)
            self._bare = Tokenizer.from_str(bare)
        except Exception as error:  # the library raises nothing more exact
            raise ModelError(f"{sidecars['tokenizer.json']}: is no tokenizer ({error}); fetch it again") from error
        self._whole.no_truncation()
        self._whole.no_padding()
        self.size = self._checked_size(size, where)
        special = {
            token.content: number for number, token in self._whole.get_added_tokens_decoder().items() if token.special
        }
        self.rules = self._rules(sidecars, special)
        self.end_token_ids = self._end_tokens(sidecars)
        self.token_bytes = token_bytes.from_tokenizer(self._whole, document, self.size)
        self._builder = prompt.PromptBuilder(self.rules, prompt.load_encoder(bare))
        self.bundle = prompt.pack(prompt.TokenizerBundle(tokenizer_json=bare, rules=self.rules))

    def __repr__(self) -> str:
        return f"<OnnxTokenizer of {self.size} tokens>"

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

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids of a text with what the model's tokenizer puts around it, as embeddings want it. Nothing in the text
        is a special token."""
        return self._builder.with_bos(self._whole.post_process(self._bare.encode(text, add_special_tokens=False)).ids)

    def _checked_size(self, size: int | None, where: str) -> int:
        known = max(self._whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if size is None:
            return known
        if known > size or known < _SMALLEST_SHARE * size:
            raise ModelError(
                f"{where}: its tokenizer.json knows {known} tokens, its logits are of {size}: they are of two models; "
                "fetch both from one place"
            )
        return size

    def _rules(self, sidecars: dict[str, Path], special: dict[str, int]) -> prompt.PromptRules:
        names = generation_config.read_json(sidecars.get("tokenizer_config.json"), _Names)
        more = generation_config.read_json(sidecars.get("special_tokens_map.json"), _Names)
        bos, eos = _text(names.bos_token or more.bos_token), _text(names.eos_token or more.eos_token)
        bos_id = self._whole.token_to_id(bos) if bos else None
        add_bos = names.add_bos_token
        if add_bos is None:
            add_bos = bos_id is not None and self._whole.encode("a").ids[:1] == [bos_id]
        return prompt.PromptRules(
            special_tokens=special,
            chat_template=_template(sidecars.get("chat_template.jinja"), names),
            bos_token=bos,
            eos_token=eos,
            bos_token_id=bos_id,
            add_bos=add_bos,
            vocab_size=self.size,
        )

    def _end_tokens(self, sidecars: dict[str, Path]) -> frozenset[int]:
        named = self._whole.token_to_id(self.rules.eos_token) if self.rules.eos_token else None
        said = genai_config.read(sidecars.get(genai_config.NAME)).eos_token_id
        ids = [said] if isinstance(said, int) else said or []
        return frozenset(token_id for token_id in (named, *ids) if token_id is not None)


def _template(path: Path | None, names: _Names) -> str | None:
    if path is not None:
        with contextlib.suppress(UnicodeDecodeError):
            return path.read_text()
    match names.chat_template:
        case list() as several:
            by_name = {one.name: one.template for one in several}
            return by_name.get("default")
        case template:
            return template


def _text(token: str | _Token | None) -> str:
    return token.content if isinstance(token, _Token) else token or ""
