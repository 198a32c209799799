"""The prompts of a loaded model: the part of a tokenizer that does not depend on the format of the model's files."""

from collections.abc import Callable

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import internal


class ModelTokenizer:
    """Makes the token ids of prompts by the model's own rules. Safe to use from several threads."""

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
