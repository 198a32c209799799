"""Offers a GGUF vocabulary to routers as a tokenizer of theirs, if that agrees with llama.cpp."""

from collections.abc import Callable, Iterator
from typing import Protocol

import structlog

from tokenbus.protocol.prompt import prompt
from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.gguf.tokenizer import bpe, probe_texts, sentencepiece, tokenizer_json
from tokenbus.worker.engine.models import pretrained_tokenizer as publishing

_SPECS: dict[str, Callable[[Metadata, dict[str, int]], tokenizer_json.TokenizerSpec | None]] = {
    "gpt2": bpe.tokenizer_spec,
    "gemma4": bpe.tokenizer_spec,
    "llama": sentencepiece.tokenizer_spec,
}


class ReferenceTokenizer(Protocol):
    """The vocabulary as llama.cpp has it."""

    rules: prompt.PromptRules
    token_bytes: list[bytes]
    user_defined: dict[str, int]
    """Tokens that are found in every text, before anything else."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a special token."""
        ...


def build(metadata: Metadata, reference: ReferenceTokenizer, published: bytes | None = None) -> bytes | None:
    """The packed bundle, or None where there is no exact one.

    It is made of the vocabulary in the file; where that can't be, `published` is tried, the tokenizer.json that lies
    beside the model or in the repository that it was made of."""
    for text in _candidates(metadata, reference, published):
        if _agrees(text, reference):
            return prompt.pack(prompt.TokenizerBundle(tokenizer_json=text, rules=reference.rules))
    return None


def _candidates(metadata: Metadata, reference: ReferenceTokenizer, published: bytes | None) -> Iterator[str]:
    model = metadata.text("tokenizer.ggml.model")
    tokenizer_spec = _SPECS[model](metadata, reference.user_defined) if model in _SPECS else None
    if tokenizer_spec is not None:
        yield tokenizer_json.write(tokenizer_spec, reference.user_defined)
    if published is not None and (text := publishing.without_special_tokens(published)) is not None:
        yield text


def _agrees(text: str, reference: ReferenceTokenizer) -> bool:
    try:
        encode = prompt.load_encoder(text)
    except ValueError as error:
        structlog.get_logger().warning("tokenizer_not_built", error=str(error))
        return False
    own = probe_texts.vocabulary_texts(reference.token_bytes, reference.rules.special_tokens, reference.user_defined)
    for probe in (*probe_texts.PROBE_TEXTS, *own):
        if encode(probe) != reference.encode(probe):
            structlog.get_logger().warning("tokenizer_differs", probe=probe[:40])
            return False
    return True
