"""An invented byte-level BPE vocabulary of any size that can encode every text."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from gguf import TokenType

from tools.demo_model import chats

# Each side of a merge is a byte or the result of an earlier merge, so any first few of them are valid too.
# "Ġ" is the space in the byte alphabet.
_MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m", "Ġo f",
    "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "a s", "l e", "Ġt h", "i on", "o m", "l l", "en t", "Ġ n", "Ġ l", "s t",
    "Ġ re", "v e", "r o", "l y", "Ġb e", "Ġ e", "Ġ g", "c t", "i d", "o t", "Ġ is", "Ġ y", "Ġy ou", "o w",
)  # fmt: skip

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

SMALLEST = len(chats.SPECIAL_TOKENS) + 256 + 1
"""Size of the smallest vocabulary: llama.cpp needs at least one merge."""


class Vocabulary(NamedTuple):
    """A vocabulary. Ids are indices into `texts`: special tokens, bytes, results of merges, invented words."""

    texts: list[str]
    kinds: list[TokenType]
    merges: list[str]


def build(size: int) -> Vocabulary:
    """Returns a vocabulary of `size` tokens, at least `SMALLEST`. No merge gives an invented word, so prompts never
    contain one, but a random model samples little else."""
    assert size >= SMALLEST, size
    base = [*chats.SPECIAL_TOKENS, *_byte_alphabet()]
    merges = list(_MERGES[: size - len(base)])
    texts = base + [merge.replace(" ", "") for merge in merges]
    words = _made_up_words(frozenset(texts))
    texts += itertools.islice(words, size - len(texts))
    special = len(chats.SPECIAL_TOKENS)
    return Vocabulary(texts, [TokenType.CONTROL] * special + [TokenType.NORMAL] * (size - special), merges)


def _byte_alphabet() -> list[str]:
    """Returns the character for each byte in byte-level BPE: printable bytes stand for themselves, the others for the
    characters from U+0100 on, in order (https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = itertools.count(0x100)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _made_up_words(taken: frozenset[str]) -> Iterator[str]:
    """Yields distinct words after a space, the short ones first; 340,000 of them have at most three syllables."""
    for length in itertools.count(1):
        for syllables in itertools.product(_SYLLABLES, repeat=length):
            word = "Ġ" + "".join(syllables)
            if word not in taken:
                yield word
