"""Makes a GGUF model's tokenizer bundle, with which routers tokenize exactly as llama.cpp does.

A tokenizer is rebuilt from the metadata and compared with llama.cpp's own on many texts. If it differs anywhere, it is
not offered, and routers ask the worker to tokenize."""

from collections.abc import Callable, Iterator

import structlog

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.tokenizers import pretrained_tokenizer
from tokenbus.worker.tokenizers.gguf import bpe, probe_texts, sentencepiece, tokenizer_json
from tokenbus.worker.tokenizers.gguf.gguf_tokenizer import GgufTokenizer

_SPECS: dict[str, Callable[[Metadata, dict[str, int]], tokenizer_json.TokenizerSpec | None]] = {
    "gpt2": bpe.tokenizer_spec,
    "gemma4": bpe.tokenizer_spec,
    "llama": sentencepiece.tokenizer_spec,
}


def build(metadata: Metadata, reference: GgufTokenizer, pretrained: bytes | None = None) -> bytes | None:
    """Returns the packed bundle, or None if no tokenizer agrees with the reference.

    `pretrained` is the `tokenizer.json` next to the model, which is tried if the rebuilt one does not agree."""
    for text in _candidates(metadata, reference, pretrained):
        if _agrees(text, reference):
            return tokenizer_bundle.pack(tokenizer_bundle.TokenizerBundle(tokenizer_json=text, rules=reference.rules))
    return None


def _candidates(metadata: Metadata, reference: GgufTokenizer, pretrained: bytes | None) -> Iterator[str]:
    model = metadata.text("tokenizer.ggml.model")
    spec = _SPECS[model](metadata, reference.user_defined) if model in _SPECS else None
    if spec is not None:
        yield tokenizer_json.write(spec, reference.user_defined)
    if pretrained is not None and (text := pretrained_tokenizer.without_special_tokens(pretrained)) is not None:
        yield text


def _agrees(text: str, reference: GgufTokenizer) -> bool:
    try:
        encode = prompt.load_encoder(text)
    except ValueError as error:
        structlog.get_logger().warning("tokenizer_not_built", error=str(error))
        return False
    # The fixed texts are the same for all models; these are made from this model's tokens.
    own = probe_texts.vocabulary_texts(reference.token_bytes, reference.rules.special_tokens, reference.user_defined)
    for probe in (*probe_texts.PROBE_TEXTS, *own):
        if encode(probe) != reference.encode(probe):
            structlog.get_logger().warning("tokenizer_differs", probe=probe[:40])
            return False
    return True
