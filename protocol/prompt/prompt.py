"""Turns prompts into token ids, with the same code in routers (with a fetched tokenizer) and workers (with their
own)."""

import math
from collections.abc import Callable

import structlog
from tokenizers import Tokenizer

from tokenbus.protocol.prompt import template, token_bound
from tokenbus.protocol.prompt.rendering import PromptPieces, Renderer, RendererSetup
from tokenbus.protocol.prompt.tokenizer_bundle import PromptRules, TokenizerBundle
from tokenbus.protocol.wire import block_hash, errors, internal

Encode = Callable[[str], list[int]]
"""Returns the token ids of a text in which no special token is parsed."""


class PromptBuilder:
    """Turns texts and conversations into token ids.

    Thread-safe; threads take turns rendering conversations, which happens in a separate process (`rendering.py`). If
    the chat template is too large or malformed, only conversations are refused; plain text still works."""

    def __init__(self, rules: PromptRules, encode: Encode, bound: token_bound.TokenBound | None = None) -> None:
        """`bound`, if given, allows refusing prompts that are certainly too long without tokenizing them."""
        self.rules = rules
        self._encode = encode
        self._bound = bound
        self._renderer: Renderer | None = None
        self.chat_unsupported_reason = "the model has no chat template"
        if rules.chat_template:
            try:
                template.check(rules.chat_template)
            except ValueError as error:
                self._refuse_chats(error)
            else:
                self._renderer = Renderer(renderer_setup(rules, rules.chat_template))

    def __repr__(self) -> str:
        return f"<PromptBuilder of {self.rules.vocab_size} tokens>"

    def build(self, request: internal.Tokenize, max_prompt_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text, of the texts around a gap, or of a conversation.

        Raises RequestError as `Renderer.render` does, prompt_too_long if the texts certainly have more than
        `max_prompt_tokens` (the bound is a lower one, so the result may still be longer), and unsupported if the model
        has no usable template or no fill-in-the-middle tokens."""
        ids: list[int] = []
        for piece in self._pieces(request, max_prompt_tokens):
            ids.extend([piece] if isinstance(piece, int) else self._encode(piece))
        return self.with_bos(ids) if request.add_special_tokens else ids

    def pack(
        self,
        request: internal.Tokenize,
        max_prompt_tokens: int | None = None,
        remembering: Callable[[Encode], Callable[[str], bytes]] | None = None,
    ) -> bytes:
        """Returns what `build` does, packed. `remembering` wraps an encode function in one that packs its result and
        may cache texts across conversations."""
        if request.messages is None or remembering is None:
            return block_hash.pack_token_ids(self.build(request, max_prompt_tokens))
        pieces, pack = self._pieces(request, max_prompt_tokens), remembering(self._encode)
        packed = b"".join(block_hash.pack_token_ids([one]) if isinstance(one, int) else pack(one) for one in pieces)
        if not request.add_special_tokens:
            return packed
        first, rest = packed[: block_hash.TOKEN_BYTES], packed[block_hash.TOKEN_BYTES :]
        return block_hash.pack_token_ids(self.with_bos(block_hash.unpack_token_ids(first).tolist())) + rest

    def _pieces(self, request: internal.Tokenize, max_prompt_tokens: int | None) -> PromptPieces:
        pieces: PromptPieces
        if request.messages is not None:
            if self._renderer is None:
                problem = f"{self.chat_unsupported_reason}: send prompt or token_ids"
                raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="messages")
            pieces = self._renderer.render(
                request.messages,
                request.chat_template_kwargs,
                request.tools,
                continues=request.continue_final_message,
            )
        elif request.text is None:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "text or messages is required", param="text")
        elif request.suffix:
            fim = self.rules.fim
            if fim is None:
                problem = "suffix is not served by this model"
                raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="suffix")
            pieces = [fim.prefix, request.text, fim.suffix, request.suffix, fim.middle]
        else:
            pieces = [request.text]  # special tokens in it are not parsed
        self._check_length([piece for piece in pieces if isinstance(piece, str)], max_prompt_tokens)
        return pieces

    @property
    def supports_chat(self) -> bool:
        return self._renderer is not None

    def start(self) -> None:
        """Starts the renderer process ahead of the first conversation. Raises OSError if it can't be started now."""
        if self._renderer is not None:
            try:
                self._renderer.start()
            except ValueError as error:
                self._refuse_chats(error)

    def close(self) -> None:
        """Ends the renderer process."""
        if self._renderer is not None:
            self._renderer.close()

    def _refuse_chats(self, error: ValueError) -> None:
        self._renderer = None
        self.chat_unsupported_reason = str(error)
        structlog.get_logger().warning("chat_template_refused", error=str(error))

    def _check_length(self, texts: list[str], max_prompt_tokens: int | None) -> None:
        # A text with fewer characters than the token limit is rarely too long, and not worth counting.
        if self._bound is None or max_prompt_tokens is None or sum(map(len, texts)) <= max_prompt_tokens:
            return
        count = sum(map(self._bound.min_tokens, texts))
        if count > max_prompt_tokens:
            raise errors.prompt_too_long(count, max_prompt_tokens + 1, is_minimum=True)

    def with_bos(self, ids: list[int]) -> list[int]:
        """Prepends BOS to `ids` if the model wants it and they don't begin with it."""
        bos = self.rules.bos_token_id
        if self.rules.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids


def renderer_setup(rules: PromptRules, source: str, *, all_cpu_s: float = math.inf) -> RendererSetup:
    """Returns the setup of a renderer for a model's template, which may use `all_cpu_s` of CPU time in total."""
    return RendererSetup(
        source=source,
        special_tokens=rules.special_tokens,
        bos_token=rules.bos_token,
        eos_token=rules.eos_token,
        all_cpu_s=all_cpu_s,
    )


def load_encoder(tokenizer_json: str) -> Encode:
    """Returns the encode function of a tokenizer in the `tokenizers` library's format, or raises ValueError."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"the tokenizer can't be read: {error}") from error

    def encode(text: str) -> list[int]:
        # Unlike encode(), a batch of one releases the GIL and does not record each token's position in the text.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def load_builder(bundle: TokenizerBundle) -> PromptBuilder:
    """Returns the prompt builder of a bundle. Raises ValueError if its tokenizer is malformed."""
    bound = token_bound.from_tokenizer_json(bundle.tokenizer_json)
    return PromptBuilder(bundle.rules, load_encoder(bundle.tokenizer_json), bound)
