"""The tokens to fill in the middle: those that a GGUF file names."""

from pathlib import Path

from tests.support import vocabularies
from tokenbus.protocol.prompt import tokenizer_bundle

_TOKENS = ["<s>", "<before>", "<behind>", "<gap>", "a", "b", "ab"]


def rules(path: Path, **more: int) -> tokenizer_bundle.PromptRules:
    entries: dict[str, vocabularies.Entry] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": _TOKENS,
        "token_type": [3, 3, 3, 3, 1, 1, 1],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": False,
    }
    with vocabularies.load(vocabularies.write(path, entries | more)) as loaded:
        return loaded.tokenizer.rules


def test_a_file_that_names_all_three_tokens_can_fill_in_the_middle(tmp_path: Path) -> None:
    found = rules(tmp_path / "fim.gguf", fim_pre_token_id=1, fim_suf_token_id=2, fim_mid_token_id=3)
    assert found.fim == tokenizer_bundle.FimTokens(prefix=1, suffix=2, middle=3)


def test_a_file_that_names_none_or_not_all_can_not(tmp_path: Path) -> None:
    assert rules(tmp_path / "none.gguf").fim is None
    assert rules(tmp_path / "two.gguf", fim_pre_token_id=1, fim_suf_token_id=2).fim is None
