"""Builds a `tokenizers` tokenizer out of a GGUF vocabulary, and offers it only where it agrees with llama.cpp."""

from collections.abc import Callable

import structlog
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from protocol import prompt
from worker.engine.gguf.metadata import Metadata

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PATTERNS = {"llama-bpe": _LLAMA_3, "llama3": _LLAMA_3, "qwen2": _QWEN_2, "gpt-2": _GPT_2}
"""How each kind of `tokenizer.ggml.pre` cuts a text before merging."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3")
"""Kinds in which a word that is a token is never merged from parts."""
_USER_DEFINED = 4

PROBES = (
    "Hello, world!",
    "  two  spaces\n\n\nand\ttabs \r\n end ",
    "I'll we've DON'T it's they'Re 'quoted'",
    "12345 + 678 = 13023, 3.14159e-10; 1,000,000",
    "def f(x):\n    return x**2  # comment\n",
    "Zürich, naïve café, Straße, ŁÓDŹ, ελληνικά, Привет, мир!",
    "日本語のテキスト。中文分词测试，한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "emoji 👍🏽 👨‍👩‍👧 and ✓ → ∞ ½ ²",
    "<|user|>not special</s> [INST] <|im_end|>",
    "a" * 40 + " " * 30 + "!?" * 20,
    "\u00a0non-breaking\u2009thin\u200bzero",
    " leading and trailing ",
    "\n",
    " ",
)


def build(metadata: Metadata, rules: prompt.PromptRules, encode: Callable[[str], list[int]]) -> bytes | None:
    """The packed bundle, or None where this vocabulary can't be rebuilt exactly. `encode` is llama.cpp's own."""
    try:
        tokenizer = _tokenizer(metadata)
    except Exception as error:  # the library raises nothing more exact for merges that make no sense
        structlog.get_logger().warning("tokenizer_not_built", error=str(error))
        return None
    if tokenizer is None:
        return None
    for probe in PROBES:
        if tokenizer.encode(probe, add_special_tokens=False).ids != encode(probe):
            structlog.get_logger().warning("tokenizer_differs", probe=probe[:40])
            return None
    return prompt.pack(prompt.TokenizerBundle(tokenizer_json=tokenizer.to_str(), rules=rules))


def _tokenizer(metadata: Metadata) -> Tokenizer | None:
    pre = metadata.text("tokenizer.ggml.pre") or ""
    if metadata.text("tokenizer.ggml.model") != "gpt2" or pre not in PATTERNS:
        return None
    texts = metadata.texts("tokenizer.ggml.tokens")
    merges = [_merge(line) for line in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    if len(vocabulary) != len(texts) or not merges:
        return None
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    kinds = metadata.ints("tokenizer.ggml.token_type")
    added = [text for text, kind in zip(texts, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def _merge(line: str) -> tuple[str, str]:
    """The two sides of a merge; the separating space is never the first character."""
    left, _, right = line[1:].partition(" ")
    return line[:1] + left, right
