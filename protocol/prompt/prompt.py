"""Makes token ids of a prompt: the same code at a router with a tokenizer bundle and at a worker with its own."""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog
import xxhash
from tokenizers import Tokenizer

from tokenbus.protocol.prompt import template, token_bound
from tokenbus.protocol.prompt.rendering import Renderer, RendererSetup
from tokenbus.protocol.wire import errors, internal, limits, messages


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's metadata says about making a prompt."""

    special_tokens: dict[str, int]
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    bos_token_id: int | None = None
    add_bos: bool = False
    vocab_size: int


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that a router needs to make a model's prompts without its files."""

    tokenizer_json: str
    """In the format of the `tokenizers` library, without special tokens."""
    rules: PromptRules


class PromptBuilder:
    """Turns texts and conversations into token ids. Safe to use from several threads, of which one renders at a time.

    A conversation is rendered in a process of its own, which is started when it is needed. Of a model whose template is
    too large or malformed conversations are refused, and texts are as good as any."""

    def __init__(
        self, rules: PromptRules, encode: Callable[[str], list[int]], bound: token_bound.TokenBound | None = None
    ) -> None:
        self.rules = rules
        self._encode = encode
        self._bound = bound
        self._renderer: Renderer | None = None
        self.chat_unsupported_reason = "the model has no chat template"
        if rules.chat_template:
            try:
                template.check(rules.chat_template)
            except ValueError as error:
                self._refuse(error)
            else:
                self._renderer = _renderer_of(rules.chat_template, rules)

    def __repr__(self) -> str:
        return f"<PromptBuilder of {self.rules.vocab_size} tokens>"

    def from_text(self, text: str, max_prompt_tokens: int | None = None) -> list[int]:
        """The ids of a text, in which no special token is parsed; begins with BOS where the model wants one.

        Raises RequestError(prompt_too_long) where it certainly has more than `max_prompt_tokens`; else it may have
        more."""
        self._check_length([text], max_prompt_tokens)
        return self.with_bos(self._encode(text))

    def from_messages(
        self,
        conversation: list[messages.ChatMessage],
        arguments: dict[str, Any] | None,
        max_prompt_tokens: int | None = None,
    ) -> list[int]:
        """The ids of a conversation by the model's template. Raises RequestError, as `from_text` does too."""
        if self._renderer is None:
            raise errors.request_error(
                errors.Code.UNSUPPORTED, f"{self.chat_unsupported_reason}: send prompt or token_ids", param="messages"
            )
        ids: list[int] = []
        pieces = self._renderer.render(conversation, arguments)
        self._check_length([piece for piece in pieces if isinstance(piece, str)], max_prompt_tokens)
        for piece in pieces:
            ids.extend([piece] if isinstance(piece, int) else self._encode(piece))
        return self.with_bos(ids)

    @property
    def supports_chat(self) -> bool:
        """Whether conversations are not all refused."""
        return self._renderer is not None

    def start(self) -> None:
        """Has at hand what it needs, so that the first conversation takes no longer than others. Raises OSError where
        there can be no process now."""
        if self._renderer is not None:
            try:
                self._renderer.start()
            except ValueError as error:
                self._refuse(error)

    def close(self) -> None:
        """Ends the process that renders."""
        if self._renderer is not None:
            self._renderer.close()

    def _refuse(self, error: ValueError) -> None:
        """Has conversations refused from now on, which that says why."""
        self._renderer = None
        self.chat_unsupported_reason = str(error)
        structlog.get_logger().warning("chat_template_refused", error=str(error))

    def _check_length(self, texts: list[str], max_prompt_tokens: int | None) -> None:
        if self._bound is None or max_prompt_tokens is None or sum(map(len, texts)) <= max_prompt_tokens:
            return
        count = sum(map(self._bound.min_tokens, texts))
        if count > max_prompt_tokens:
            raise errors.request_error(
                errors.Code.PROMPT_TOO_LONG,
                f"the prompt has at least {count} tokens; with one to generate it must fit {max_prompt_tokens + 1}",
            )

    def with_bos(self, ids: list[int]) -> list[int]:
        """With BOS before them, where the model wants one and they have none."""
        bos = self.rules.bos_token_id
        if self.rules.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids


def _renderer_of(source: str, rules: PromptRules) -> Renderer:
    return Renderer(
        RendererSetup(
            source=source, special_tokens=rules.special_tokens, bos_token=rules.bos_token, eos_token=rules.eos_token
        )
    )


def load_encoder(tokenizer_json: str) -> Callable[[str], list[int]]:
    """The encode function of a tokenizer in the `tokenizers` library's format. Raises ValueError if it is malformed."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"the tokenizer can't be read: {error}") from error

    def encode(text: str) -> list[int]:
        # For a batch of one it gives Python's lock up meanwhile, and does not note where in the text each token stands.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def load_builder(bundle: TokenizerBundle) -> PromptBuilder:
    """Raises ValueError for a malformed tokenizer."""
    return PromptBuilder(
        bundle.rules, load_encoder(bundle.tokenizer_json), token_bound.from_tokenizer_json(bundle.tokenizer_json)
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TokenizerBundle)


def pack(bundle: TokenizerBundle) -> bytes:
    return _encoder.encode(bundle)


def bundle_digest(packed: bytes) -> str:
    """What a card says of its bundle, so that routers fetch each bundle once."""
    return xxhash.xxh3_128_hexdigest(packed)


def to_parts(packed: bytes) -> list[internal.TokenizerPart]:
    """A packed bundle as messages that fit any broker's limit."""
    digest = bundle_digest(packed)
    starts = range(0, len(packed), limits.PART_BYTES)
    return [
        internal.TokenizerPart(
            digest=digest, part=number, parts=len(starts), data=packed[start : start + limits.PART_BYTES]
        )
        for number, start in enumerate(starts)
    ]


def from_parts(parts: list[internal.TokenizerPart], digest: str) -> TokenizerBundle:
    """The bundle that the parts, in order, make up. Raises ValueError if it is not the one with that digest."""
    packed = b"".join(part.data for part in parts)
    if bundle_digest(packed) != digest:
        raise ValueError("the tokenizer bundle does not have the digest that the card announced")
    return unpack(packed)


def unpack(packed: bytes) -> TokenizerBundle:
    """Raises ValueError if it is malformed."""
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError as error:
        raise ValueError(f"the tokenizer bundle is malformed: {error}") from error
