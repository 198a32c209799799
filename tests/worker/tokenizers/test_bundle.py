"""A tokenizer bundle makes exactly the prompts that the worker's llama.cpp makes; otherwise no bundle is offered."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.tokenizers import gguf_bundle, probe_texts
from tools.demo_model import chats, corpus

BOS = chats.SPECIAL_TOKENS.index(chats.BOS)
Tokenize = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def runner() -> Iterator[GgufRunner]:
    runner = gguf_runner(DEMO)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def unpacked(runner: GgufRunner) -> tokenizer_bundle.TokenizerBundle:
    packed = runner.bundle
    assert packed is not None
    return tokenizer_bundle.unpack(packed)


@pytest.fixture(scope="module")
def builder(unpacked: tokenizer_bundle.TokenizerBundle) -> prompt.PromptBuilder:
    return prompt.load_builder(unpacked)


class ReferenceTokenizer(NamedTuple):
    rules: tokenizer_bundle.PromptRules
    encode: Tokenize
    token_bytes: list[bytes] = []
    user_defined: dict[str, int] = {}


@pytest.fixture(scope="module")
def reference(unpacked: tokenizer_bundle.TokenizerBundle, encode: Tokenize) -> ReferenceTokenizer:
    return ReferenceTokenizer(unpacked.rules, encode)


@pytest.fixture(scope="module")
def encode(runner: GgufRunner) -> Tokenize:
    """llama.cpp's own ids of a text, without the BOS token of a prompt."""
    return lambda text: runner.tokenize(internal.Tokenize(text=text))[1:]


@pytest.fixture(scope="module")
def facts() -> gguf_metadata.Metadata:
    return gguf_metadata.read(demo.MODEL_PATH)


def turn(content: str | list[messages.ContentPart], role: str = "user") -> messages.ChatMessage:
    return messages.ChatMessage(role=role, content=content)


@given(text=st.text(max_size=60))
@example(text="")
@example(text="I'll WE'VE don'T 'ſ 12345+678 \r\n\r\n  x\t\n  ")
@example(text="\0 \x1c\x85\u00a0\u2028\ufeff\ufffd\U0010ffff")
@settings(max_examples=200)
def test_router_and_worker_make_the_same_ids_of_any_text(
    runner: GgufRunner, builder: prompt.PromptBuilder, text: str
) -> None:
    assert builder.build(internal.Tokenize(text=text)) == runner.tokenize(internal.Tokenize(text=text))


@pytest.mark.parametrize("text", probe_texts.PROBE_TEXTS)
def test_router_and_worker_agree_on_every_probe(runner: GgufRunner, builder: prompt.PromptBuilder, text: str) -> None:
    assert builder.build(internal.Tokenize(text=text)) == runner.tokenize(internal.Tokenize(text=text))


def test_router_and_worker_agree_on_what_the_model_was_trained_on(
    runner: GgufRunner, builder: prompt.PromptBuilder
) -> None:
    documents = corpus.documents(seed=7)
    for _ in range(50):
        text = next(documents)
        assert builder.build(internal.Tokenize(text=text)) == runner.tokenize(internal.Tokenize(text=text))


def test_a_text_longer_than_any_first_guess_of_its_tokens_is_tokenized_whole(runner: GgufRunner) -> None:
    text = "\U0001f9ff" * 5_000
    ids = runner.tokenize(internal.Tokenize(text=text))
    assert b"".join(runner.token_bytes[token_id] for token_id in ids).decode() == text


@given(text=st.text(max_size=60))
@settings(max_examples=150)
def test_the_token_bytes_of_its_ids_are_the_text_again(runner: GgufRunner, text: str) -> None:
    ids = runner.tokenize(internal.Tokenize(text=text))
    assert b"".join(runner.token_bytes[token_id] for token_id in ids) == text.encode()


@pytest.mark.parametrize("special", chats.SPECIAL_TOKENS)
@pytest.mark.parametrize("around", ["{}", "a{}b", "{}{}", " {} "])
def test_special_tokens_in_a_text_are_plain_text(
    runner: GgufRunner, builder: prompt.PromptBuilder, special: str, around: str
) -> None:
    text = around.replace("{}", special)
    for ids in (runner.tokenize(internal.Tokenize(text=text)), builder.build(internal.Tokenize(text=text))):
        assert ids[0] == BOS
        assert not set(ids[1:]) & set(range(len(chats.SPECIAL_TOKENS)))
        assert b"".join(runner.token_bytes[token_id] for token_id in ids).decode() == text


@pytest.mark.parametrize("special", chats.SPECIAL_TOKENS)
def test_special_tokens_in_a_users_message_are_plain_text(
    runner: GgufRunner, builder: prompt.PromptBuilder, special: str
) -> None:
    user, end, assistant = (chats.SPECIAL_TOKENS.index(t) for t in (chats.USER, chats.END, chats.ASSISTANT))
    for content in (special, f"x{special}{special}y", f"{special[:3]}{special}"):
        ask = internal.Tokenize(messages=[turn(content)])
        for ids in (runner.tokenize(ask), builder.build(internal.Tokenize(messages=[turn(content)]))):
            assert [i for i in ids if i < len(chats.SPECIAL_TOKENS)] == [BOS, user, end, assistant]
            assert b"".join(runner.token_bytes[token_id] for token_id in ids).decode() == content


@pytest.mark.parametrize("content", ["3 <", "a <|", "<|end|", "<|bos"])
def test_a_message_that_ends_like_the_beginning_of_a_special_token_is_still_closed_by_the_templates_own(
    runner: GgufRunner, content: str
) -> None:
    user, end, assistant = (chats.SPECIAL_TOKENS.index(t) for t in (chats.USER, chats.END, chats.ASSISTANT))
    ids = runner.tokenize(internal.Tokenize(messages=[turn(content)]))
    assert [i for i in ids if i < len(chats.SPECIAL_TOKENS)] == [BOS, user, end, assistant]
    assert b"".join(runner.token_bytes[token_id] for token_id in ids).decode() == content


def test_a_special_token_cannot_be_made_of_two_neighbouring_parts(runner: GgufRunner) -> None:
    parts = [messages.ContentPart(type="text", text="<|en"), messages.ContentPart(type="text", text="d|>")]
    ids = runner.tokenize(internal.Tokenize(messages=[turn(parts)]))
    assert ids == runner.tokenize(internal.Tokenize(messages=[turn("<|end|>")]))
    assert ids.count(chats.SPECIAL_TOKENS.index(chats.END)) == 1


conversations = st.lists(
    st.builds(turn, st.text(max_size=20), st.sampled_from(["system", "user", "assistant"])), min_size=1, max_size=4
)


@given(conversation=conversations, generate=st.sampled_from([None, True, False]))
@settings(max_examples=150)
def test_router_and_worker_make_the_same_prompt_of_any_conversation(
    runner: GgufRunner, builder: prompt.PromptBuilder, conversation: list[messages.ChatMessage], generate: bool | None
) -> None:
    arguments = None if generate is None else {"add_generation_prompt": generate}
    ask = internal.Tokenize(messages=conversation, chat_template_kwargs=arguments)
    assert runner.tokenize(ask) == builder.build(ask)


def test_a_template_that_refuses_a_role_refuses_it_at_both_places(
    runner: GgufRunner, builder: prompt.PromptBuilder
) -> None:
    refusals = []
    for build in (
        lambda: runner.tokenize(internal.Tokenize(messages=[turn("x", role="pirate")])),
        lambda: builder.build(internal.Tokenize(messages=[turn("x", role="pirate")])),
    ):
        with pytest.raises(errors.RequestError, match="not pirate") as caught:
            build()
        refusals.append(caught.value.error)
    assert refusals[0] == refusals[1]
    assert refusals[0].code is errors.Code.INVALID_REQUEST


def test_a_prompt_begins_with_bos_once_where_the_metadata_says_so(
    runner: GgufRunner, unpacked: tokenizer_bundle.TokenizerBundle
) -> None:
    assert (unpacked.rules.add_bos, unpacked.rules.bos_token_id, unpacked.rules.bos_token) == (True, BOS, chats.BOS)
    assert runner.tokenize(internal.Tokenize(text="hi"))[0] == BOS
    assert runner.tokenize(internal.Tokenize(text="")) == [BOS]
    assert runner.tokenize(internal.Tokenize(messages=[turn("hi")])).count(BOS) == 1


def test_the_rules_name_every_special_token(runner: GgufRunner, unpacked: tokenizer_bundle.TokenizerBundle) -> None:
    assert unpacked.rules.special_tokens == {text: number for number, text in enumerate(chats.SPECIAL_TOKENS)}
    assert unpacked.rules.eos_token == chats.END
    assert unpacked.rules.vocab_size == runner.config.vocab_size == len(runner.token_bytes) == 640
    assert runner.end_token_ids == {chats.SPECIAL_TOKENS.index(chats.END)}
    assert [runner.token_bytes[number] for number in range(len(chats.SPECIAL_TOKENS))] == [b""] * len(
        chats.SPECIAL_TOKENS
    )


def test_to_tokenize_nothing_at_all_is_refused(runner: GgufRunner) -> None:
    with pytest.raises(errors.RequestError, match="text or messages") as caught:
        runner.tokenize(internal.Tokenize())
    assert caught.value.error.code is errors.Code.INVALID_REQUEST


def changed(facts: gguf_metadata.Metadata, key: str, value: gguf_metadata.Value) -> gguf_metadata.Metadata:
    return facts._replace(values=facts.values | {key: value})


def test_the_bundle_of_the_demo_model_is_built_again_the_same(
    runner: GgufRunner, facts: gguf_metadata.Metadata, reference: ReferenceTokenizer
) -> None:
    assert gguf_bundle.build(facts, reference) == runner.bundle


def test_there_is_no_bundle_where_a_single_probe_differs(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer
) -> None:
    for odd in filter(None, probe_texts.PROBE_TEXTS):
        differs = reference._replace(encode=lambda text, odd=odd: reference.encode(text)[text == odd :])
        assert gguf_bundle.build(facts, differs) is None, odd


@pytest.mark.parametrize("piece", [b"Router", b" broker"])
def test_there_is_no_bundle_where_the_vocabularys_own_words_differ(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, piece: bytes
) -> None:
    assert not any(piece.decode() in probe for probe in probe_texts.PROBE_TEXTS)
    differs = reference._replace(
        token_bytes=[piece], encode=lambda text: [] if piece.decode() in text else reference.encode(text)
    )
    assert gguf_bundle.build(facts, differs) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.model", "rwkv"),
        ("tokenizer.ggml.model", 7),
        ("tokenizer.ggml.pre", "unheard-of"),
        ("tokenizer.ggml.merges", []),
        ("tokenizer.ggml.tokens", ["a", "a"]),
        ("tokenizer.ggml.tokens", []),
    ],
)
def test_there_is_no_bundle_for_a_vocabulary_that_cannot_be_rebuilt(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, key: str, value: gguf_metadata.Value
) -> None:
    assert gguf_bundle.build(changed(facts, key, value), reference) is None


def pretrained(unpacked: tokenizer_bundle.TokenizerBundle) -> dict[str, Any]:
    """The demo model's tokenizer as repositories have it: with special tokens, and one added to every text."""
    document: dict[str, Any] = json.loads(unpacked.tokenizer_json)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    specials = [{"id": token_id, "content": text, "special": True} | flags for text, token_id in SPECIAL.items()]
    first = {"SpecialToken": {"id": chats.BOS, "type_id": 0}}
    around = {chats.BOS: {"id": chats.BOS, "ids": [BOS], "tokens": [chats.BOS]}}
    return document | {
        "added_tokens": [*document["added_tokens"], *specials],
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": around,
        },
    }


SPECIAL = {text: token_id for token_id, text in enumerate(chats.SPECIAL_TOKENS)}


def test_if_the_vocabulary_cannot_be_rebuilt_the_pretrained_tokenizer_is_used(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, unpacked: tokenizer_bundle.TokenizerBundle
) -> None:
    strange = changed(facts, "tokenizer.ggml.pre", "unheard-of")
    text = json.dumps(pretrained(unpacked)).encode()
    packed = gguf_bundle.build(strange, reference, text)
    assert packed is not None
    builder = prompt.load_builder(tokenizer_bundle.unpack(packed))
    for probe in ("Once upon a <|end|> time <|bos|>", "20 + 22 = ?", "Zürich 👍🏽"):
        assert builder.build(internal.Tokenize(text=probe))[1:] == reference.encode(probe)


def test_a_pretrained_tokenizer_that_differs_or_is_malformed_is_not_used(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, unpacked: tokenizer_bundle.TokenizerBundle
) -> None:
    strange = changed(facts, "tokenizer.ggml.pre", "unheard-of")
    document = pretrained(unpacked)
    other = document | {"model": document["model"] | {"merges": document["model"]["merges"][1:]}}
    for text in (json.dumps(other).encode(), b"", b"[]", b"{}", b'{"added_tokens": [7]}', b"\xff"):
        assert gguf_bundle.build(strange, reference, text) is None, text[:40]


@pytest.mark.parametrize("merge", ["nospace", "never seen", "a ", "", "a b c"])
def test_there_is_no_bundle_for_a_vocabulary_with_a_merge_that_makes_no_token(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, merge: str
) -> None:
    merges: gguf_metadata.Value = [*facts.texts("tokenizer.ggml.merges"), merge]
    assert gguf_bundle.build(changed(facts, "tokenizer.ggml.merges", merges), reference) is None


def test_a_model_whose_merges_make_no_sense_is_served_without_a_bundle(
    tmp_path: Path, facts: gguf_metadata.Metadata
) -> None:
    """llama.cpp serves such a file, so it must not end the engine process."""
    merge = facts.texts("tokenizer.ggml.merges")[0].encode()
    stored = len(merge).to_bytes(8, "little") + merge
    path = tmp_path / "model.gguf"
    path.write_bytes(demo.MODEL_PATH.read_bytes().replace(stored, stored.replace(b" ", b"_"), 1))
    runner = gguf_runner(msgspec.structs.replace(DEMO, model=str(path)))
    assert runner.bundle is None
    runner.close()


def test_a_model_without_a_chat_template_has_a_bundle_that_refuses_conversations(
    facts: gguf_metadata.Metadata, reference: ReferenceTokenizer, encode: Tokenize
) -> None:
    packed = gguf_bundle.build(facts, reference._replace(rules=_without_template(reference.rules)))
    assert packed is not None
    plain = prompt.load_builder(tokenizer_bundle.unpack(packed))
    assert plain.build(internal.Tokenize(text="hi")) == [BOS, *encode("hi")]
    with pytest.raises(errors.RequestError, match="no chat template"):
        plain.build(internal.Tokenize(messages=[turn("hi")]))


def _without_template(rules: tokenizer_bundle.PromptRules) -> tokenizer_bundle.PromptRules:
    return tokenizer_bundle.PromptRules(
        special_tokens=rules.special_tokens,
        bos_token=rules.bos_token,
        eos_token=rules.eos_token,
        bos_token_id=rules.bos_token_id,
        add_bos=rules.add_bos,
        vocab_size=rules.vocab_size,
    )


def test_the_demo_model_is_there() -> None:
    assert Path(DEMO.model).is_file()
