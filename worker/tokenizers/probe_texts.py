"""The texts on which a rebuilt tokenizer must agree with llama.cpp's own before it is offered to routers."""

from collections.abc import Iterable

_MAX_PROBED = 200
"""The number of tokens probed of each kind: the texts have a few thousand characters and take milliseconds."""

PROBE_TEXTS = (
    "",
    " ",
    "\n",
    "Hello, world!",
    "  two  spaces\n\n\nand\ttabs \r\n end ",
    " leading and trailing ",
    "I'll we've DON'T it's they'Re 'quoted' I'M she'D y'all'd've o'clock rock'n'roll",
    "'S 'T 'RE 'VE 'M 'LL 'D 's't're've'm'll'd ''s x''t 'sX 'lL 'Ll 'ſ ’s ’LL",
    "it'sx it'Tab it'mno it'Def it'rest it'VEry it'llama 'sAb\n'tXyz\n'ddd\n''llx\n'rE've1'll\n'd's'm.t",
    "CamelCaseWord HTTPServer iPhone MacOSX aB Ab ABc abC ÉcoleÉ éÉ ΣΊΣΥΦΟΣ ЁЖик ǅungla",
    "0 12 123 1234 12345 123456 1234567 12345678 007 1e10 0xFF 3.14159e-10 1,000,000 -5 +7 50% x1y22z333 9a99b999c9999",
    "x  1   22    333     4444\t\t5\n\n6 \n 7 .8 ,  9- 0\u00a0\u00a01 \u3000 2",
    "٠١٢٣٤٥ ०१२३ ½ ² Ⅷ ①②③ 一二三 ௧௨௩௪ 𝟘𝟙𝟚 4²½5",
    "def f(x):\n    return x**2  # comment\n\n\n\tif x != y:\n\t\tprint(f'{x!r}', end=\"\")\n        pass\r\n\r\n",
    "https://example.org/a/b?c=d&e=%20#f user@mail.net /usr//bin/\n ./a\\b C:\\dir\n//\n/\r\n",
    "!?...---===___***~~~``` $5 £6 €7 ¥8 <=> <- -> => ^^ || && @@ ## [x] {y} (z) «w» “v” ‘u’ „t“ …–—",
    "a.b,c;d:e!f?g-h_i/j\\k|l a .b ,c ;d :e !f ?g -h _i /j \\k |l .\n,\n!\n\n?\r\n",
    "Zürich, naïve café, Straße, ŁÓDŹ, ελληνικά, Привет, мир! Đặng Thị Ngọc, İstanbul, ı, ﬁne, Ǆ, ΐ",
    "日本語のテキスト。中文分词测试，「引用」、한국어 텍스트 カタカナ ｶﾀｶﾅ 豈 㐀 𠀀 〇 々 ー ㄅㄆ ㄱㅏ！？：；",
    "العربية ، عربي؟ עברית שָׁלוֹם हिन्दी में। தமிழ் ไทยก็ ລາວ ខ្មែរ မြန်မာ বাংলা తెలుగు ქართული ᲐᲑ አማርኛ ᏣᎳᎩ",
    "e\u0301 a\u030a\u0323 \u0301x n\u0303\u0303 Z\u0351\u036b\u0343 \u0e49\u0e49 क्ष\u200dक x\u20dd \u0300\n\u0300",
    "emoji 👍🏽 👨‍👩‍👧 🏳️‍🌈 🇩🇪🇫🇷 ☺️ 1️⃣ and ✓ → ∞ ½ ² ™ ♥\ufe0f 🫠🧿🧿🧿",
    "𝒜𝓑 𝕏 𐐀𐐨 𐍈 𞤀 \U0001f9ff\U000e0041\U0010ffff \ue000\ufffd\ufeff\ufffe",
    "<|user|>not special</s> [INST] <|im_end|> <s> </s> <unk> <pad> <0x41> <0x0A> [UNK] [CLS] <mask> ▁▁ Ġ Ċ ##ing",
    "<0x41>",
    "<0xE2>\n<0xAB>",
    "\u00a0non-breaking\u2009thin\u200bzero\u3000wide\u2028line\u2029par\u0085next\u1680ogham\u202f \u180e\u2060",
    "\u3000\u3000x \u00a0 y\u00a0\n\u2003\u2003\n z\u3000。 \u3000、\u3000",
    "\x00 \x01\x02 \x07\x08 \x0b\x0c \x1b[31m \x1c\x1d\x1e\x1f \x7f\x80\x9f x\x00y\x1fz",
    "\t \t\t  \t\n\t\n \n  \n   \n\n \r \r\r \r\n\r\n \n\r\x0b\n \x0c\n",
    "a \n b  \n  c\n   d\n\n    e\n\n\n     f \n\n g\t\n\th",
    "a" * 40 + " " * 30 + "!?" * 20,
    "x" + " " * 100 + "y" + "\n" * 50 + "z" + "\t" * 20 + "w" + "\r\n" * 20 + " " * 7,
    "=" * 65 + "-" * 33 + "." * 17 + "1" * 50 + "0" * 7 + "é" * 20 + "漢" * 20 + "👍" * 20 + "\u0301" * 9,
    "lol" * 30 + "ha" * 30 + "aaab" * 20 + "ABAB" * 15 + "▁" * 20 + "ababa" * 9,
    "The quick brown fox jumps over the lazy dog. Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. "
    "Portez ce vieux whisky au juge blond qui fume. Съешь же ещё этих мягких французских булок, да выпей чаю.",
    '{"key": [1, 2.5, null, true], "text": "line\\nbreak \\u00e9"}\n<p class="a">&nbsp;</p>\n\\frac{1}{2} $$x_{i}^2$$',
    "SELECT * FROM t WHERE a>=1 AND b<>'x';-- ok\n#include <stdio.h>\nint main(void){return 0;}/* end */\n\n\n\n",
)


def vocabulary_texts(token_bytes: list[bytes], special: Iterable[str], added_tokens: Iterable[str]) -> list[str]:
    """Returns texts made from a vocabulary's own tokens: ordinary, special and added ones."""
    words = _sample([text for one in token_bytes if (text := one.decode(errors="ignore"))])
    marks, added = _sample(list(special)), list(added_tokens)
    joined = [by.join(texts) for texts in (words, marks, _sample(added)) for by in ("", " ", "x", "\n")]
    return joined + _sample(_overlaps(added))


def _sample(texts: list[str]) -> list[str]:
    return texts[:: len(texts) // _MAX_PROBED + 1]


def _overlaps(texts: list[str]) -> list[str]:
    """Returns texts in which one token ends within another, so that the search order decides which is found."""
    ordered = sorted(texts, key=len)
    by_prefix = {text[:end]: text for text in ordered for end in range(1, len(text))}
    return [
        text[:start] + by_prefix[text[start:]]
        for text in ordered
        for start in range(1, len(text))
        if text[start:] in by_prefix
    ]
