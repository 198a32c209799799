r"""The patterns by which llama.cpp splits a text before merging, for each value of `tokenizer.ggml.pre`.

A pre-tokenizer is a sequence of patterns. Each splits every part left by the previous ones; the text between two
matches is a part too. Source: `llm_tokenizer_bpe` and `llama_vocab::impl::load` in llama.cpp's src/llama-vocab.cpp, and
src/unicode.cpp, which decides what the patterns there mean:
- A letter class such as `\p{Lu}` means every letter, but ASCII ranges next to it mean what they say.
- In a pattern without any `\p`, white space beyond ASCII matches `\s` only, never a range that contains it.
- Some patterns stand for dedicated code in llama.cpp: numbers split from the right, Kimi's words without Han.
llama.cpp's tables are of Unicode 15.1 and those of `tokenizers` of a later version: newer characters may be split
differently.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """Patterns in Oniguruma syntax."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is a token is taken whole rather than merged from parts."""


_ENDINGS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORDS = rf"{_LEAD}\p{{L}}+"
_MARKED_WORDS = rf"{_LEAD}[\p{{L}}\p{{M}}]+"
_NO_WORDS = r" ?[^\s\p{L}\p{N}]+"
_GAPS = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_GAPS}"
_SYMBOLS = rf"{_NO_WORDS}[\r\n]*|{_LINES}"
_PATHS = rf"{_NO_WORDS}[\r\n/]*|{_LINES}"
_HALVED_GAPS = "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s"

_GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_NO_WORDS}|{_GAPS}"
_LLAMA_3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}"
_QWEN_2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_SYMBOLS}"
_QWEN_35 = rf"{_ENDINGS}|{_MARKED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_BAILING = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_NO_WORDS}[\r\n]*|\s*[\r\n]|{_GAPS}"
_EXAONE_MOE = (
    rf"{_ENDINGS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_NO_WORDS}[\r\n/]?|\s*[\r\n]|{_GAPS}"
)
_SEED_CODER = rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_CODE_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_3 = rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
_SPARK = rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_GAPS}"
_HAN_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EASTERN = r"[[\u0800-\u9fa5\uac00-\ud7ff]&&\S]+"
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"
_YOUTU_EASTERN = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_AND_KANA}"
)
_AFMOE_EASTERN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_FROM_THE_RIGHT = r"\P{N}*(?:(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|(?<=\p{N})\p{N}{3}|\z)"
"""Numbers in threes from the right; the first part of each includes the preceding text. Only that part looks for the
number's end. The end of the text matches too, because a search for a number that never comes would start over at each
character."""

_HAN = (
    r"\u4e00-\u9fff\u3400-\u4dbf\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b820}-\x{2ceaf}"
    r"\x{2ceb0}-\x{2ebef}\uf900-\ufaff\x{2f800}-\x{2fa1f}"
)
_KIMI = rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+(?:{_ENDINGS})?|\p{{N}}{{1,3}}|{_SYMBOLS}"


def _by_case(upper: str, lower: str, ending: str = "") -> str:
    """Returns a pattern that starts a new word where a lower-case letter is followed by a capital."""
    return rf"{_LEAD}{upper}*{lower}+{ending}|{_LEAD}{upper}+{lower}*{ending}"


_ENDED = rf"(?:{_ENDINGS})?"
_BIG, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = rf"{_by_case(_BIG, _SMALL)}|\p{{N}}|{_PATHS}"
_GPT_4O = rf"{_by_case(_BIG, _SMALL, _ENDED)}|\p{{N}}{{1,3}}|{_PATHS}"
_MARKED = _by_case(r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]", _ENDED)
_GRANITE = rf"{_MARKED}|\p{{N}}{{1,3}}|{_PATHS}"
_TINY_AYA = rf"{_MARKED_WORDS}{_ENDED}|\p{{N}}{{1,3}}|{_PATHS}"
_YOUTU = rf"{_MARKED_WORDS}{_ENDED}|\p{{N}}|{_PATHS}"

_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", r"[0-9][0-9][0-9]"
_CHAMELEON = (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT_2)
_LINE_RUNS = r"[^\n]+|\n+"

_KINDS = (
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT_2, _DIGITS, _THREE_DIGITS))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5",
        PreTokenizer((_LLAMA_3,), ignore_merges=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA_3,))),
    ("jais-2", PreTokenizer((rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_NO_WORDS}[\r\n]*|\s*[\r\n]+|{_HALVED_GAPS}",))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORDS}|\p{{N}}+|{_SYMBOLS}"), ignore_merges=True)),
    (
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+\z", _EASTERN, _DIGITS)),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_3))),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _SPARK, _DIGIT))),
    ("youtu", PreTokenizer((_YOUTU_EASTERN, _YOUTU), ignore_merges=True)),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT_2, _THREE_DIGITS))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((_DIGIT, _GPT_2))),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT_2,)),
    ),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN_2,))),
    ("qwen35", PreTokenizer((_QWEN_35,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True)),
    ("chameleon", PreTokenizer(_CHAMELEON)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT_4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GRANITE,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((_FROM_THE_RIGHT, _TINY_AYA))),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("superbpe", PreTokenizer((_DIGITS, r"(?=(?:[0-9]{3})+(?![0-9]))"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("ufakzeka", PreTokenizer((rf"{_WORDS}|\p{{N}}|{_SYMBOLS}",))),
    ("afmoe", PreTokenizer((_FROM_THE_RIGHT, _AFMOE_EASTERN, _DEEPSEEK_3))),
    ("laguna", PreTokenizer((_LINE_RUNS, _QWEN_2))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
)

PRE_TOKENIZERS = {name: one for names, one in _KINDS for name in names.split()}

_BY_CODE = frozenset({_GPT_2, _LLAMA_3, _QWEN_2, _QWEN_35, _KIMI, _LINE_RUNS, _DIGIT})
"""The patterns that llama.cpp carries out with code of its own, and one that matches single characters only."""


def recurses(pre: str) -> bool:
    """Returns whether llama.cpp splits a text with `std::regex`, which calls itself for each character of a match: one
    of some 30,000 characters overflows the stack of a thread."""
    return pre not in PRE_TOKENIZERS or not _BY_CODE.issuperset(PRE_TOKENIZERS[pre].patterns)
