"""Grammars of the kinds that users of llama.cpp write: each accepts what it should, and nothing else."""

import pytest

from tests.support.tiny_vocabulary import END, compiler, constraint, encode
from tokenbus.worker.engine.constraints.grammar import ConstraintError

GRAMMARS = {
    "arithmetic": r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
""",
    "code": r"""
root ::= declaration*
declaration ::= type " " name "(" parameter? ")" " {" statement* "}"
type ::= "int" | "float" | "char"   # no pointers
parameter ::= type " " name
statement ::= type " " name " = " number ";" | "return " name ";" | "while (" name ") {" statement* "}"
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
number ::= [0-9]+ ("." [0-9]+)?
""",
    "chess": r"""
# moves in algebraic notation
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
""",
    "words": r"""
root ::= word ([ !?.,:;'"] word)*
word ::= [a-zA-Z0-9.,!?(){}"'] [a-z0-9()]*
""",
    "japanese": r"""
root ::= kana+ ([ \t\n] kana+)*
kana ::= hiragana | katakana | cjk
hiragana ::= [ぁ-ゟ]
katakana ::= [ァ-ヿ]
cjk ::= [一-鿿]
""",
    "json": r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
""",
    "json_array": r"""
root ::= "[\n" item (",\n" item)* "\n]"
item ::= "true" | "false" | [0-9]+
""",
    "list": r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
""",
}
"""They are in the manner of the samples in llama.cpp's tree."""
TEXTS = {
    "arithmetic": (["1+2=3\n", "(a *b_2)/7= x\ny=1\n"], ["1+2", "1+=2\n", "=1\n"]),
    "code": (["", "int f(char c) {float x = 1.5;while (x) {return x;}}"], ["int f", "int f() {return 1;}"]),
    "chess": (["1. e4 e5\n2. Nf3 O-O-O+\n", "1. exd5 a8=Q#\n12. R1xa1 b6\n"], ["1. e9 e5\n2. a1 a2\n", "1. e4 e5\n"]),
    "words": (["Some words,(here)", "a"], ["", "two  spaces", "tab\t"]),
    "japanese": (["こんにちは カタカナ", "漢字"], ["romaji", "ひ a"]),
    "json": (['{"a": [1, -2.5e3, "\\u00e9é"], "b": {}}'], ["[1]", '{"a": 01x}', '{"a"}']),
    "json_array": (["[\n1,\ntrue\n]"], ["[1]", "[\n]"]),
    "list": (["- one\n- zwei ü\n"], ["- \n", "one\n"]),
}
"""Texts that each accepts, and some that it does not."""


def accepts(source: str, text: str) -> bool:
    matcher = compiler().compile(constraint("gbnf", source))
    try:
        for token_id in encode(text):
            matcher.accept(token_id)
        return bool(matcher.forced() == END or matcher.allowed()[END])
    except ConstraintError:
        return False


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_of_this_kind_is_understood(name: str) -> None:
    right, wrong = TEXTS[name]
    for text in right:
        assert accepts(GRAMMARS[name], text), text
    for text in wrong:
        assert not accepts(GRAMMARS[name], text), text
